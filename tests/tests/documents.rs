//! Checks the documents: links lead to files and headings, decision records are short and indexed, plots are drawn from the
//! records beside them.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use integration::{Scratch, repository};

/// Words of a decision record at most, table cells included.
const RECORD_WORDS: usize = 300;

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Adds all files below `folder` that `wanted` accepts by name, without hidden folders and build output.
fn add_files(folder: &Path, wanted: fn(&str) -> bool, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if name.starts_with('.') || name == "target" {
            continue;
        }
        if entry.file_type().expect("a type").is_dir() {
            add_files(&path, wanted, found);
        } else if wanted(&name) {
            found.push(path);
        }
    }
}

fn add_documents(folder: &Path, found: &mut Vec<PathBuf>) {
    add_files(folder, |name| name.ends_with(".md"), found);
}

/// The lines of a document that are not code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// The targets of a document's links.
fn links(text: &str) -> Vec<&str> {
    prose(text)
        .flat_map(|line| line.split("](").skip(1))
        .filter_map(|rest| rest.split(')').next())
        .collect()
}

/// A heading's anchor, as GitHub derives it.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let anchor = heading.trim().to_lowercase();
    anchor.chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut documents = Vec::new();
    add_documents(repository(), &mut documents);
    assert!(documents.len() > 100, "only {} documents found", documents.len());
    let mut broken = Vec::new();
    for document in documents {
        let text = read(&document);
        for link in links(&text).into_iter().filter(|link| !link.contains("://")) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => document.clone(),
                file => document.parent().expect("a folder").join(file),
            };
            let heading_exists = |text: String| {
                prose(&text)
                    .filter(|line| line.starts_with('#'))
                    .any(|line| anchor(line.trim_start_matches('#')) == heading)
            };
            if !target.exists() || !heading.is_empty() && !heading_exists(read(&target)) {
                broken.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether a path of documents, such as `queue/` or `crates/queue/src/`, is that of a folder: `*`, `<…>` and system folders
/// are none.
fn is_folder_name(name: &str) -> bool {
    let known = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-/.".contains(c);
    name.ends_with('/') && !name.starts_with(['/', '.']) && name.chars().all(known)
}

/// Names of the code in documents, such as `Queue::pop`, `virtio_blk/parse.rs` and `virtio_blk/`, are those of the code.
#[test]
fn named_code_exists() {
    let root = repository();
    let (mut documents, mut sources, mut files) = (Vec::new(), Vec::new(), Vec::new());
    add_documents(root, &mut documents);
    add_files(root, |name| name.ends_with(".rs"), &mut sources);
    add_files(root, |_| true, &mut files);
    let code: Vec<String> = sources.iter().map(|source| read(source)).collect();
    let words: Vec<HashSet<&str>> =
        code.iter().map(|text| text.split(|c| !is_word(c)).collect()).collect();
    // Documents write `crates/block/src/node.rs`, or shorter `block/node.rs`.
    let shortened =
        |path: &PathBuf| PathBuf::from(path.display().to_string().replace("/src/", "/"));
    sources.extend(sources.iter().map(shortened).collect::<Vec<_>>());
    files.extend(files.iter().map(shortened).collect::<Vec<_>>());
    let folders: HashSet<&Path> = files.iter().flat_map(|file| file.ancestors().skip(1)).collect();
    let mut checked = 0;
    let mut unknown = Vec::new();
    for document in &documents {
        let text = read(document);
        for line in prose(&text) {
            for name in line.split('`').skip(1).step_by(2) {
                let name = name.trim_end_matches("()");
                let exists = if name.ends_with(".rs") && !name.contains(['*', ' ']) {
                    let template = ["NAME.rs", "FAMILY"].iter().any(|part| name.contains(part));
                    template || sources.iter().any(|source| source.ends_with(name))
                } else if name.contains("::") && name.chars().all(|c| is_word(c) || c == ':') {
                    let parts: Vec<&str> = name.split("::").collect();
                    let has = |words: &HashSet<&str>, part: &&str| words.contains(*part);
                    // A type and its member are in one file. Files do not name their own modules.
                    if name.starts_with(|c: char| c.is_uppercase()) {
                        words.iter().any(|words| parts.iter().all(|part| has(words, part)))
                    } else {
                        parts.iter().all(|part| words.iter().any(|words| has(words, part)))
                    }
                } else if is_folder_name(name) {
                    folders.iter().any(|folder| folder.ends_with(name))
                } else {
                    continue;
                };
                checked += 1;
                if !exists {
                    unknown.push(format!("{}: {name}", document.display()));
                }
            }
        }
    }
    assert!(unknown.is_empty(), "there is no:\n{}", unknown.join("\n"));
    assert!(checked > 200, "only {checked} names found");
}

/// The records that a text names: by `decisions/NUMBER…`, `record NUMBER`, `(NUMBER)` or `[NUMBER](…)`. The second part of
/// each is what follows the number.
fn named_records(text: &str) -> Vec<(&str, &str)> {
    let starts = ["decisions/", "record ", "records ", "(0", "[0"];
    let found = starts.into_iter().flat_map(|start| {
        let zero = usize::from(start.ends_with('0'));
        text.match_indices(start).map(move |(at, _)| (start, &text[at + start.len() - zero..]))
    });
    found
        .filter_map(|(start, rest)| {
            let (number, rest) = rest.split_at_checked(4)?;
            let is_number = number.starts_with('0') && number.bytes().all(|c| c.is_ascii_digit());
            let ends = match start {
                "(0" => rest.starts_with(')'),
                "[0" => rest.starts_with("](") && rest.contains(')'),
                _ => !rest.starts_with(|c: char| c.is_ascii_digit()),
            };
            (is_number && ends).then_some((number, rest))
        })
        .collect()
}

/// A record that was removed or renamed is named nowhere. The number of a link is that of its target.
#[test]
fn named_decision_records_exist() {
    let root = repository();
    let (mut files, mut records) = (Vec::new(), Vec::new());
    add_files(root, |_| true, &mut files);
    add_documents(&root.join("docs/decisions"), &mut records);
    let records: Vec<String> = records
        .iter()
        .map(|record| record.file_name().expect("a name").to_string_lossy().into_owned())
        .collect();
    let mut named = 0;
    let mut wrong = Vec::new();
    for file in files {
        // Pictures are no text, and this file has examples.
        let Ok(text) = fs::read_to_string(&file) else { continue };
        if file.ends_with("tests/tests/documents.rs") {
            continue;
        }
        for (number, rest) in named_records(&text) {
            let word = |text: &str| -> String {
                text.chars().take_while(|&c| c.is_alphanumeric() || c == '-').collect()
            };
            let right = match rest.strip_prefix("](") {
                Some(target) => {
                    let target = target.split(')').next().expect("split returns one part at least");
                    target.rsplit('/').next().is_some_and(|name| name.starts_with(number))
                }
                None => records.iter().any(|record| match word(rest) {
                    name if name.is_empty() => record.starts_with(&format!("{number}-")),
                    name => *record == format!("{number}{name}.md"),
                }),
            };
            named += 1;
            if !right {
                wrong.push(format!("{}: {number}", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "records that do not exist:\n{}", wrong.join("\n"));
    assert!(named > 100, "only {named} names of records found");
}

#[test]
fn names_of_records_are_found() {
    let text =
        "decisions/0001-a.md, record 0002: (0003) [0004](x/0004-b.md) (0o644) 0005 [0006] (00071)";
    let numbers: Vec<&str> = named_records(text).into_iter().map(|(number, _)| number).collect();
    assert_eq!(numbers, ["0001", "0002", "0003", "0004"]);
}

/// Numbers are unique, so a record's number is enough to name it.
#[test]
fn decision_records_are_short_numbered_and_indexed() {
    let docs = repository().join("docs");
    let index = read(&docs.join("DESIGN.md"));
    let mut records = Vec::new();
    add_documents(&docs.join("decisions"), &mut records);
    let mut numbers = HashSet::new();
    for record in records {
        let name = record.file_name().expect("a name").to_string_lossy();
        let text = read(&record);
        let number = name.split('-').next().expect("split returns one part at least").to_owned();
        let is_number = number.len() == 4 && number.bytes().all(|c| c.is_ascii_digit());
        assert!(is_number, "{name} does not begin with a number of four digits");
        assert!(numbers.insert(number.clone()), "two records have the number {number}");
        assert!(text.starts_with("# "), "{name} has no title");
        let words = text.split_whitespace().count();
        assert!(
            words <= RECORD_WORDS,
            "{name} has {words} words, at most {RECORD_WORDS} are allowed"
        );
        let entries: Vec<&str> =
            index.lines().filter(|line| line.contains(&format!("](decisions/{name})"))).collect();
        let listed = matches!(entries[..], [line] if line.starts_with(&format!("| {number} [")));
        assert!(listed, "docs/DESIGN.md should have one line for {name}: {entries:?}");
    }
    assert!(numbers.len() > 50, "only {} records found", numbers.len());
}

#[test]
fn plots_are_drawn_from_the_records() {
    let (plots, drawn) = (repository().join("docs/plots"), Scratch::new());
    let status = Command::new(plots.join("draw")).arg(drawn.path(".")).status().expect("python3");
    assert!(status.success(), "docs/plots/draw: {status}");
    let mut count = 0;
    for entry in fs::read_dir(&plots).expect("a folder").map(|entry| entry.expect("an entry")) {
        if entry.path().extension().is_some_and(|kind| kind == "svg") {
            let again = read(&drawn.path(&entry.file_name().to_string_lossy()));
            assert!(read(&entry.path()) == again, "{:?}: run docs/plots/draw", entry.file_name());
            count += 1;
        }
    }
    assert_eq!(count, 4);
}

/// The folders whose one program is `main.rs`.
fn test_programs() -> Vec<PathBuf> {
    let mut programs = Vec::new();
    add_files(repository(), |name| name == "main.rs", &mut programs);
    programs.retain(|program| program.parent().is_some_and(|folder| folder.ends_with("tests")));
    programs
}

#[test]
fn every_test_file_is_a_module_of_its_program() {
    let programs = test_programs();
    assert!(programs.len() >= 9, "{programs:?}");
    for program in programs {
        let modules = read(&program);
        let manifest = read(&program.with_file_name("../Cargo.toml"));
        for entry in fs::read_dir(program.parent().expect("a folder")).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.file_stem().expect("a name").to_string_lossy();
            let is_code = path.extension().is_some_and(|end| end == "rs") && name != "main"
                || path.join("mod.rs").is_file();
            let is_program = manifest.contains(&format!("[[test]]\nname = \"{name}\""));
            let is_module = modules.lines().any(|line| line == format!("mod {name};"));
            assert!(!is_code || is_module || is_program, "{} is not compiled", path.display());
        }
    }
}
