//! The text of state files, and how their options are merged with those of the command line.

use control::{
    Action, Command, SavedState, Step, configuration, option_words, parse_args, relative_path,
};
use proptest::prelude::*;

fn steps(options: &[&str]) -> Vec<Step> {
    let program = ["ringmill", "storage-daemon"].map(str::to_owned);
    let words = options.iter().flat_map(|option| option_words(option));
    match parse_args(program.into_iter().chain(words).map(Into::into)) {
        Ok(Command::StorageDaemon(options)) => options.steps,
        other => panic!("{other:?}"),
    }
}

fn owned(options: &[&str]) -> Vec<String> {
    options.iter().map(|option| (*option).to_owned()).collect()
}

fn state(command_line: &[&str], options: &[&str]) -> SavedState {
    SavedState::parse(&SavedState::text(&owned(command_line), &owned(options)))
        .expect("a state file")
}

fn origins(steps: &[Step]) -> Vec<&str> {
    steps.iter().map(|step| step.origin.as_str()).collect()
}

const IO: &str = "--object iothread,id=io";
const DISK: &str = "--blockdev null-co,node-name=disk";
const MONITOR: [&str; 2] =
    ["--chardev socket,id=m,path=/m,server=on,wait=off", "--monitor chardev=m"];
const EXPORT: &str = "--export vhost-user-blk,id=e,node-name=disk,addr.type=unix,addr.path=/e";

#[test]
fn a_first_start_carries_out_the_command_line_in_order() {
    let given = steps(&[DISK, MONITOR[0], IO, MONITOR[1], EXPORT]);
    let merged = SavedState::default().merge(&given).expect("nothing to merge");
    assert_eq!((merged.given, merged.kept), (given, vec![]));
}

#[test]
fn an_unchanged_command_line_keeps_changes_by_commands() {
    let more = "--blockdev null-co,node-name=more";
    // The state: node `disk` is removed, node `more` is added, and the export is on `more`.
    let moved = EXPORT.replace("node-name=disk", "node-name=more");
    let state = state(&[IO, DISK, EXPORT], &[IO, more, &moved]);
    let given = steps(&[MONITOR[0], MONITOR[1], IO, DISK, EXPORT]);
    let merged = state.merge(&given).expect("it fits");
    assert_eq!(origins(&merged.given), [MONITOR[0], MONITOR[1], IO]);
    assert_eq!(origins(&merged.kept), [more, &moved]);
    assert!(merged.changes.is_empty());
}

/// Options with the same meaning in another spelling are no change.
#[test]
fn equal_options_in_other_words_are_no_change() {
    let json = r#"--blockdev {"driver": "null-co", "node-name": "disk"}"#;
    let state = state(&[DISK], &[json]);
    let merged = state.merge(&steps(&[json])).expect("it fits");
    assert_eq!((origins(&merged.given), merged.kept.len()), (vec![json], 0));
}

#[test]
fn changes_of_the_command_line_apply() {
    let (added, changed) =
        ("--object iothread,id=new", "--blockdev null-co,node-name=disk,size=1048576");
    let (gone, more) = ("--object iothread,id=gone", "--blockdev null-co,node-name=more");
    let state = state(&[IO, gone, DISK], &[IO, gone, DISK, more]);
    let merged = state.merge(&steps(&[IO, changed, added])).expect("it fits");
    assert_eq!(origins(&merged.given), [IO, changed, added]);
    assert_eq!(origins(&merged.kept), [more]);
    assert_eq!(
        merged.changes,
        ["removed object 'gone'", "added object 'new'", "changed node 'disk'"]
    );
}

/// A node that refers to `disk`.
const ABOVE: &str = "--blockdev raw,node-name=above,file.driver=raw,file.file=disk";

#[test]
fn what_both_have_added_is_the_command_lines() {
    let on_command_line = "--blockdev null-co,node-name=disk,size=1048576";
    let by_command = "--blockdev null-co,node-name=disk,size=2097152";
    let state_of = state(&[], &[by_command, EXPORT]);
    let merged = state_of.merge(&steps(&[on_command_line])).expect("it is granted");
    assert_eq!(origins(&merged.given), [on_command_line]);
    assert_eq!(origins(&merged.kept), [EXPORT]);
    assert_eq!(merged.warnings.len(), 1, "{:?}", merged.warnings);
    assert!(merged.warnings[0].starts_with("node 'disk' is on the command line and in the"));
    // An export may get other options, and not another node.
    let other = "--blockdev null-co,node-name=other";
    let queues = format!("{EXPORT},num-queues=4");
    let moved = EXPORT.replace("node-name=disk", "node-name=other");
    let state = state(&[DISK, other], &[DISK, other, EXPORT]);
    let merged = state.merge(&steps(&[DISK, other, &queues])).expect("it is granted");
    assert_eq!(origins(&merged.given), [DISK, other, queues.as_str()]);
    let error = state.merge(&steps(&[DISK, other, &moved])).expect_err("a conflict");
    assert!(error.message.starts_with("export 'e' was added"), "{error}");
}

#[test]
fn conflicting_changes_are_refused() {
    let on_command_line = "--blockdev null-co,node-name=disk,size=1048576";
    let by_command = "--blockdev null-co,node-name=disk,size=2097152";
    for (before, now, kept, words) in [
        (vec![DISK], vec![on_command_line], vec![by_command], ["changed", "changed"]),
        (vec![DISK], vec![on_command_line], vec![], ["changed", "removed"]),
        (vec![DISK], vec![], vec![by_command], ["removed", "changed"]),
        (vec![], vec![on_command_line], vec![by_command, ABOVE], ["added", "added"]),
    ] {
        let error = state(&before, &kept).merge(&steps(&now)).expect_err("a conflict");
        let [line, commands] = words;
        let expected = format!(
            "node 'disk' was {line} on the command line, and {commands} by commands of a monitor"
        );
        assert_eq!(error.message, expected);
        assert!(error.hint.is_some());
    }
    // The same change on both sides is no conflict.
    let merged = state(&[DISK], &[by_command]).merge(&steps(&[by_command])).expect("it fits");
    assert_eq!(origins(&merged.given), [by_command]);
}

/// An export on an overlay must not return to the base: that would hide writes since the snapshot.
#[test]
fn an_export_that_a_snapshot_has_moved_does_not_come_back() {
    let top = "--blockdev qcow2,node-name=top,file.driver=file,file.filename=/top,backing=disk";
    let moved = EXPORT.replace("node-name=disk", "node-name=top");
    let state = state(&[DISK, EXPORT], &[DISK, top, &moved]);
    let merged = state.merge(&steps(&[DISK, EXPORT])).expect("it fits");
    assert_eq!(origins(&merged.given), [DISK]);
    assert_eq!(origins(&merged.kept), [top, &moved]);
    let changed = format!("{EXPORT},num-queues=4");
    let error = state.merge(&steps(&[DISK, &changed])).expect_err("a conflict");
    assert!(error.message.starts_with("export 'e' was changed"), "{error}");
}

#[test]
fn inconsistent_results_are_refused() {
    let state = state(&[DISK], &[DISK, EXPORT]);
    let error = state.merge(&[]).expect_err("the export's node is gone");
    assert!(error.message.contains("Cannot find device='' nor node-name='disk'"), "{error}");
    assert!(error.message.starts_with("--export"), "{error}");
}

#[test]
fn definitions_come_after_their_references() {
    let below = "--blockdev null-co,node-name=below";
    let above = "--blockdev raw,node-name=disk,file=below";
    // A node that commands added lies on `disk`, which the command line splits in two.
    let on_it = "--blockdev raw,node-name=on-it,file=disk";
    let state = state(&[DISK], &[DISK, on_it]);
    let merged = state.merge(&steps(&[below, above])).expect("it fits");
    assert_eq!(origins(&merged.given), [below, above]);
    assert_eq!(origins(&merged.kept), [on_it]);
}

#[test]
fn paths_that_depend_on_the_folder_are_found() {
    let found = |option: &str| {
        let action = steps(&[option]).remove(0).action;
        relative_path(&action).map(|path| path.display().to_string())
    };
    assert_eq!(found("--blockdev file,node-name=a,filename=x").as_deref(), Some("x"));
    assert_eq!(found("--blockdev file,node-name=a,filename=/x"), None);
    let nested = "--blockdev qcow2,node-name=a,file.driver=file,file.filename=y";
    assert_eq!(found(nested).as_deref(), Some("y"));
    assert_eq!(found("--nbd-server addr.type=unix,addr.path=s").as_deref(), Some("s"));
    assert_eq!(found("--object tls-creds-x509,id=t,dir=d").as_deref(), Some("d"));
    assert_eq!(found(MONITOR[0]), None);
}

/// No option but those of `secret` has a secret. Options with secrets must be kept out of the file: the daemon refuses a
/// `secret` with plain data.
#[test]
fn no_option_has_a_secret() {
    let Ok(Command::Print(help)) =
        parse_args(["ringmill", "--generate", "reference"].map(Into::into))
    else {
        panic!("the reference");
    };
    for name in ["password", "passwordid", "secret"] {
        let row = format!("| `{name}` |");
        assert!(!help.contains(&row), "{row}: is it kept out of the state file?");
    }
}

/// Random configurations: options that fit together.
fn configurations() -> impl Strategy<Value = Vec<String>> {
    let node = (0u8..6, 0u64..3, any::<bool>());
    prop::collection::vec(node, 0..8).prop_map(|nodes| {
        let mut options = Vec::new();
        let mut seen = Vec::new();
        for (number, size, exported) in nodes {
            if seen.contains(&number) {
                continue;
            }
            let size = (size + 1) << 20;
            options.push(format!("--blockdev null-co,node-name=n{number},size={size}"));
            if let (Some(below), true) = (seen.last(), size > 1 << 20) {
                options.push(format!("--blockdev raw,node-name=r{number},file=n{below}"));
            }
            if exported {
                options.push(format!(
                    r#"--export {{"type": "vhost-user-blk", "id": "e{number}", "node-name": "n{number}", "addr": {{"type": "unix", "path": "/s\"\\{number}"}}}}"#
                ));
            }
            seen.push(number);
        }
        options
    })
}

fn sorted(steps: impl IntoIterator<Item = Step>) -> Vec<String> {
    let mut origins: Vec<_> = steps.into_iter().map(|step| step.origin).collect();
    origins.sort();
    origins
}

proptest! {
    #[test]
    fn a_written_file_reads_back_equal(line in configurations(), options in configurations()) {
        let state = SavedState::parse(&SavedState::text(&line, &options)).expect("a state file");
        prop_assert_eq!(configuration(&state.command_line), line);
        prop_assert_eq!(configuration(&state.options), options);
    }

    /// With an unchanged command line, the result is what commands left.
    #[test]
    fn the_same_command_line_keeps_everything(line in configurations(), options in configurations()) {
        let state = SavedState::parse(&SavedState::text(&line, &options)).expect("a state file");
        let merged = state.merge(&state.command_line).expect("it fits");
        let all = merged.given.into_iter().chain(merged.kept);
        prop_assert_eq!(sorted(all), sorted(state.options));
    }

    /// If commands changed nothing, the command line alone counts.
    #[test]
    fn without_commands_the_command_line_counts(before in configurations(), now in configurations()) {
        let state = SavedState::parse(&SavedState::text(&before, &before)).expect("a state file");
        let now = SavedState::parse(&SavedState::text(&now, &[])).expect("a state file").command_line;
        let merged = state.merge(&now).expect("it fits");
        prop_assert!(merged.kept.is_empty());
        prop_assert_eq!(sorted(merged.given), sorted(now));
    }

    /// A merge either fails, or gives a valid configuration from known options.
    #[test]
    fn any_three_are_merged_or_refused(
        before in configurations(), now in configurations(), kept in configurations(),
    ) {
        let state = SavedState::parse(&SavedState::text(&before, &kept)).expect("a state file");
        let now = SavedState::parse(&SavedState::text(&now, &[])).expect("a state file").command_line;
        if let Ok(merged) = state.merge(&now) {
            let all: Vec<Action> =
                merged.given.iter().chain(&merged.kept).map(|step| step.action.clone()).collect();
            let known = |action: &Action| {
                now.iter().chain(&state.options).any(|step| step.action == *action)
            };
            prop_assert!(all.iter().all(known));
            control::Inventory::check(&[merged.given, merged.kept].concat()).expect("it fits");
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in ".{0,200}") {
        let _ = SavedState::parse(&text);
    }

    /// A file that is truncated or damaged in one place causes no panic. A truncated file is
    /// refused.
    #[test]
    fn a_damaged_file_is_no_panic(line in configurations(), at in 0usize..4000, with in any::<char>()) {
        let text = SavedState::text(&line, &line);
        let at = text.char_indices().map(|(at, _)| at).take_while(|place| *place <= at).last().unwrap_or(0);
        let cut = SavedState::parse(&text[..at]);
        prop_assert!(cut.is_err() || at == text.len() - 1);
        let mut changed = text[..at].to_owned();
        changed.push(with);
        changed.extend(text[at..].chars().skip(1));
        let _ = SavedState::parse(&changed);
    }
}
