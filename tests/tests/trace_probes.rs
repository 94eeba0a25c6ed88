//! The static probes in the daemon: what perf, bpftrace and gdb read.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use integration::daemon;
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, NoteIterator, ProgramHeader, SectionHeader};
use object::{LittleEndian, elf};

type Header = FileHeader64<LittleEndian>;

/// A note of `.note.stapsdt`.
#[derive(Debug)]
struct Probe {
    nop: u64,
    base: u64,
    semaphore: u64,
    name: String,
    arguments: String,
}

impl Probe {
    fn parse(description: &[u8]) -> Probe {
        let (words, texts) = description.split_at(24);
        let mut words = words.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        let mut word = || words.next().unwrap();
        let (nop, base, semaphore) = (word(), word(), word());
        let texts = std::str::from_utf8(texts).expect("texts");
        let mut texts = texts.split('\0').map(str::to_owned);
        let mut text = || texts.next().expect("a text");
        assert_eq!(text(), "ringmill", "the provider");
        Probe { nop, base, semaphore, name: text(), arguments: text() }
    }
}

#[test]
fn each_event_is_a_probe() {
    let program = fs::read(daemon()).expect("the daemon");
    let header = Header::parse(&*program).expect("an ELF file");
    let sections = header.sections(LittleEndian, &*program).expect("sections");
    let section = |name: &str| {
        let found = sections.section_by_name(LittleEndian, name.as_bytes());
        found.unwrap_or_else(|| panic!("no section {name}")).1
    };
    let notes = section(".note.stapsdt").data(LittleEndian, &*program).expect("its contents");
    let mut notes = NoteIterator::<Header>::new(LittleEndian, 4, notes).expect("notes");
    let mut probes = Vec::new();
    while let Some(note) = notes.next().expect("a note") {
        assert_eq!((note.name(), note.n_type(LittleEndian).0), (&b"stapsdt"[..], 3));
        probes.push(Probe::parse(note.desc()));
    }

    let names: Vec<_> = probes.iter().map(|probe| probe.name.as_str()).collect();
    let names: BTreeSet<_> = names.into_iter().collect();
    let help = Command::new(daemon()).args(["storage-daemon", "--trace", "help"]).output();
    let help = String::from_utf8(help.expect("the daemon").stdout).expect("names");
    let known: BTreeSet<_> = help.lines().collect();
    assert_eq!(names, known, "`--trace help` is on the right");
    assert_eq!(probes.len(), known.len(), "one place each");

    let base = section(".stapsdt.base");
    let (base_address, base_offset) = (base.sh_addr(LittleEndian), base.sh_offset(LittleEndian));
    let counters = section(".probes");
    assert_eq!(counters.sh_type(LittleEndian), elf::SHT_PROGBITS, "not .bss: it has a file offset");
    let start = counters.sh_addr(LittleEndian);
    let end = start + counters.sh_size(LittleEndian);
    let segments = header.program_headers(LittleEndian, &*program).expect("segments");
    for probe in &probes {
        for argument in probe.arguments.split(' ') {
            assert!(argument.trim_start_matches('-').starts_with("8@"), "{probe:?}");
        }

        // Each has a separate counter, in the file's data segment.
        assert!(start <= probe.semaphore && probe.semaphore + 2 <= end, "{probe:?}");
        assert!(probe.semaphore.is_multiple_of(2), "{probe:?}");
        let same = probes.iter().filter(|other| other.semaphore == probe.semaphore);
        assert_eq!(same.count(), 1, "{probe:?}");

        // The nop is at the address that the program's segments give, and at the one that perf computes: the distance from the
        // base is equal in the file and in memory.
        assert_eq!(probe.base, base_address, "not prelinked");
        let by_segment = segments.iter().find_map(|segment| {
            let inside = probe.nop.checked_sub(segment.p_vaddr(LittleEndian))?;
            (segment.p_type(LittleEndian) == elf::PT_LOAD
                && inside < segment.p_filesz(LittleEndian))
            .then(|| segment.p_offset(LittleEndian) + inside)
        });
        let by_perf = probe.nop.wrapping_sub(probe.base).wrapping_add(base_offset);
        assert_eq!(by_segment, Some(by_perf), "{probe:?}");
        if cfg!(target_arch = "x86_64") {
            assert_eq!(program[by_perf as usize], 0x90, "a nop: {probe:?}");
        }
    }
}
