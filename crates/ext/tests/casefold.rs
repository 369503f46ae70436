//! Names that ignore case, beside the tables of e2fsprogs, which are the kernel's.

mod common;

use std::io::Write;
use std::process::Command;

use common::{Image, skipped};
use draconis_device::Random;
use draconis_ext::format::casefold;
use draconis_ext::format::hash::{Hash, Seed};

/// Names asked of one process.
const BATCH: usize = 100_000;

/// The hash of the folded name, as `debugfs` computes it; `None`, said aloud, without it.
fn hashes(image: &Image, names: &[String]) -> Option<Vec<u32>> {
    let mut script = tempfile::NamedTempFile::new().unwrap();
    for name in names {
        writeln!(script, "dx_hash -h half_md4 -c -e utf8 {name}").unwrap();
    }
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new("debugfs")
        .arg("-f")
        .arg(script.path())
        .arg(image.path())
        .env("PATH", path)
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            skipped(format_args!("debugfs: {error}"));
            return None;
        }
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let found: Vec<u32> = text
        .split("\nHash of ")
        .skip(1)
        .map(|line| {
            let (_, rest) = line.split_once(" is 0x").unwrap();
            u32::from_str_radix(&rest[..8], 16)
                .or_else(|_| u32::from_str_radix(rest.split_once(' ').unwrap().0, 16))
                .unwrap()
        })
        .collect();
    assert_eq!(found.len(), names.len(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(found)
}

/// Each name is folded as e2fsprogs folds it; says how many were changed by that.
fn check(image: &Image, names: &[String]) -> Option<u64> {
    let hash = Hash::of_version(1, false, Seed::new([0; 4])).unwrap();
    let mut changed = 0;
    for batch in names.chunks(BATCH) {
        for (name, theirs) in batch.iter().zip(hashes(image, batch)?) {
            let folded = casefold::folded(name.as_bytes());
            let bytes = folded.as_deref().unwrap_or(name.as_bytes());
            assert_eq!(hash.of(bytes), theirs, "{}", name.escape_unicode());
            changed += u64::from(bytes != name.as_bytes());
        }
    }
    Some(changed)
}

/// What the requests of `debugfs` can name.
fn is_plain(point: char) -> bool {
    !point.is_control() && !point.is_whitespace() && !matches!(point, '"' | '\\' | '/')
}

#[test]
fn every_character_is_folded_as_the_tables_of_the_volume_say() {
    let Some(image) = Image::make(None, "1M", &[]) else { return };
    let names: Vec<String> = ('!'..=char::MAX)
        .filter(|point| is_plain(*point))
        .map(|point| format!("X{point}\u{307}"))
        .collect();
    let Some(changed) = check(&image, &names) else { return };
    assert!(changed > 1_000_000, "{changed}");
}

#[test]
fn characters_in_a_row_are_folded_as_the_tables_of_the_volume_say() {
    let Some(image) = Image::make(None, "1M", &[]) else { return };
    let mut random = Random::new(12);
    // Letters with forms, marks of many classes, syllables, what is ignorable and what is new.
    let ranges: [(u32, u32); 12] = [
        (0x41, 0x5A),
        (0xC0, 0x17F),
        (0x300, 0x36F),
        (0x370, 0x3FF),
        (0x591, 0x5C7),
        (0xE31, 0xE4E),
        (0x1DC0, 0x1DFF),
        (0x1E00, 0x1FFF),
        (0x200B, 0x206F),
        (0xAC00, 0xD7A3),
        (0x1100, 0x11FF),
        (0x1D15E, 0x1D1C0),
    ];
    let names: Vec<String> = (0..50_000)
        .map(|_| {
            let mut name = String::from("n");
            for _ in 0..=random.below(8) {
                let (first, last) = ranges[random.below(ranges.len() as u64) as usize];
                let point = first + random.below(u64::from(last - first) + 1) as u32;
                name.extend(char::from_u32(point).filter(|point| is_plain(*point)));
            }
            name
        })
        .collect();
    check(&image, &names);
}
