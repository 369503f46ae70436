//! Case-insensitive names, compared with e2fsprogs, whose tables are the kernel's.

mod common;

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use common::{Image, compare, skipped};
use draconis_device::Random;
use draconis_ext::format::casefold;
use draconis_ext::format::hash::{HashSeed, NameHash};
use draconis_ext::format::inode::flags;
use draconis_ext::{Error, Volume};

/// Offset of `s_encoding_flags`.
const ENCODING_FLAGS_AT: u64 = 1024 + 0x27E;
/// Names per `debugfs` process.
const BATCH: usize = 100_000;

/// Returns the hashes of the folded names from `debugfs`; `None`, with a message, without it.
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

/// Checks that each name folds as in e2fsprogs; returns how many names folding changed.
fn check(image: &Image, names: &[String]) -> Option<u64> {
    let hash = NameHash::of_version(1, false, HashSeed::new([0; 4])).unwrap();
    let mut changed = 0;
    for batch in names.chunks(BATCH) {
        for (name, theirs) in batch.iter().zip(hashes(image, batch)?) {
            let folded = casefold::fold_name(name.as_bytes());
            let bytes = folded.as_deref().unwrap_or(name.as_bytes());
            assert_eq!(hash.of(bytes), theirs, "{}", name.escape_unicode());
            changed += u64::from(bytes != name.as_bytes());
        }
    }
    Some(changed)
}

/// Returns true if a `debugfs` request can contain the character.
fn is_plain(point: char) -> bool {
    !point.is_control() && !point.is_whitespace() && !matches!(point, '"' | '\\' | '/')
}

/// Skips empty planes; these and private use are sampled, one code point in sixteen.
fn is_populated(point: char) -> bool {
    point < '\u{30000}' || ('\u{E0000}'..'\u{E2000}').contains(&point)
}

#[test]
fn every_character_is_folded_as_the_tables_of_the_volume_say() {
    let Some(image) = Image::make(None, "1M", &[]) else { return };
    let names: Vec<String> = ('!'..=char::MAX)
        .filter(|point| is_plain(*point) && (is_populated(*point) || u32::from(*point) % 16 == 0))
        .map(|point| format!("X{point}\u{307}"))
        .collect();
    let Some(changed) = check(&image, &names) else { return };
    assert!(changed > 200_000, "{changed}");
}

#[test]
fn characters_in_a_row_are_folded_as_the_tables_of_the_volume_say() {
    let Some(image) = Image::make(None, "1M", &[]) else { return };
    let mut random = Random::new(12);
    // Cased letters, marks of many classes, syllables, ignorable and new characters.
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

/// Returns names in two equivalent forms.
fn pairs(count: u32) -> Vec<(String, String)> {
    let forms = |nth| {
        [
            (format!("ReadMe {nth}.TXT"), format!("readme {nth}.txt")),
            (format!("\u{C9}t\u{E9} {nth}"), format!("E\u{301}TE\u{301} {nth}")),
            (format!("Stra\u{DF}e {nth}"), format!("STRASSE {nth}")),
            (
                format!("\u{AC01}\u{AD}\u{3A3} {nth}"),
                format!("\u{1100}\u{1161}\u{11A8}\u{3C2} {nth}"),
            ),
        ]
    };
    (0..count).flat_map(forms).collect()
}

const INVALID: &[u8] = b"No Text \xFF";

fn fill(dir: &Path, count: u32) {
    fs::create_dir(dir).unwrap();
    for (name, _) in pairs(count) {
        fs::write(dir.join(&name), &name).unwrap();
    }
    fs::write(dir.join(OsStr::from_bytes(INVALID)), b"").unwrap();
}

/// Makes a directory case-insensitive.
fn fold(image: &Image, name: &str) {
    let volume = image.open();
    let inode = volume.inode(volume.lookup(volume.root(), name.as_bytes()).unwrap()).unwrap();
    let all = inode.flags | flags::CASEFOLD;
    image.debugfs_write(&format!("set_inode_field {name} flags {all:#x}"));
}

/// Makes an image with two case-insensitive directories, of one block and with an htree, and a
/// plain one.
fn make(arguments: &[&str]) -> Option<Image> {
    let source = tempfile::tempdir().unwrap();
    for (name, count) in [("few", 2), ("many", 60), ("plain", 10)] {
        fill(&source.path().join(name), count);
    }
    let mut all = vec!["-t", "ext4", "-O", "casefold,^has_journal"];
    all.extend(arguments);
    let image = Image::make(Some(source.path()), "8M", &all)?;
    ["few", "many"].into_iter().for_each(|name| fold(&image, name));
    // Rebuilds the htree with folded names.
    common::run("e2fsck", &["-fyD", image.path()])?;
    common::run("e2fsck", &["-fn", image.path()])?;
    Some(image)
}

/// Checks that every name is found in both forms, and no other name is.
fn check_names(volume: &Volume, dir: &str) {
    let dir = volume.lookup(volume.root(), dir.as_bytes()).unwrap();
    let listed = compare::names(volume, dir);
    let pairs = pairs(listed.len() as u32 / 4);
    assert_eq!(listed.len(), pairs.len() + 1);
    for (name, other) in &pairs {
        let number = listed[name.as_bytes()];
        assert_eq!(volume.lookup(dir, name.as_bytes()), Ok(number), "{name}");
        assert_eq!(volume.lookup(dir, other.as_bytes()), Ok(number), "{other}");
        let neither = format!("{other}x");
        assert_eq!(volume.lookup(dir, neither.as_bytes()), Err(Error::NotFound), "{neither}");
    }
    assert_eq!(volume.lookup(dir, INVALID), Ok(listed[INVALID]));
    assert_eq!(volume.lookup(dir, b"NO TEXT \xFF"), Err(Error::NotFound));
    assert_eq!(volume.lookup(dir, b"."), Ok(dir));
}

#[test]
fn names_are_found_in_every_form() {
    for arguments in [&["-b", "1024"][..], &["-b", "4096"], &["-b", "1024", "-O", "^metadata_csum"]]
    {
        let Some(image) = make(arguments) else { return };
        let volume = image.open();
        ["few", "many"].into_iter().for_each(|dir| check_names(&volume, dir));
        let plain = volume.lookup(volume.root(), b"plain").unwrap();
        assert!(volume.lookup(plain, b"ReadMe 1.TXT").is_ok());
        assert_eq!(volume.lookup(plain, b"readme 1.txt"), Err(Error::NotFound));
        assert_eq!(volume.lookup(volume.root(), b"FEW"), Err(Error::NotFound));
    }
}

#[test]
fn a_strict_volume_has_no_names_that_are_no_text() {
    let Some(image) = make(&["-b", "1024", "-E", "encoding_flags=strict"]) else { return };
    let volume = image.open();
    let few = volume.lookup(volume.root(), b"few").unwrap();
    assert!(volume.lookup(few, b"readme 1.txt").is_ok());
    assert!(matches!(volume.lookup(few, b"\xFF"), Err(Error::Misuse(_))));
    let plain = volume.lookup(volume.root(), b"plain").unwrap();
    assert!(volume.lookup(plain, INVALID).is_ok());
}

#[test]
fn names_that_were_hashed_by_other_tables_are_found_unless_the_volume_says_no() {
    let Some(image) = make(&["-b", "1024", "-O", "^metadata_csum"]) else { return };
    // The htree of this image keeps the hashes of unfolded names.
    let source = tempfile::tempdir().unwrap();
    fill(&source.path().join("many"), 60);
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "casefold,^has_journal,^metadata_csum"];
    let Some(other) = Image::make(Some(source.path()), "8M", &arguments) else { return };
    common::run("e2fsck", &["-fyD", other.path()]);
    fold(&other, "many");
    [&image, &other].into_iter().for_each(|image| check_names(&image.open(), "many"));
    for image in [&image, &other] {
        let file = fs::File::options().write(true).open(&image.path).unwrap();
        file.write_all_at(&casefold::FLAG_BY_HASH_ONLY.to_le_bytes(), ENCODING_FLAGS_AT).unwrap();
    }
    check_names(&image.open(), "many");
    let volume = other.open();
    let many = volume.lookup(volume.root(), b"many").unwrap();
    let found = |(name, _): &(String, String)| volume.lookup(many, name.as_bytes()).is_ok();
    let pairs = pairs(60);
    let count = pairs.iter().filter(|pair| found(pair)).count();
    assert!(count < pairs.len() / 2, "{count}");
}

#[test]
fn of_two_names_that_fold_to_the_same_each_is_found_as_it_is() {
    let source = tempfile::tempdir().unwrap();
    let dir = source.path().join("dir");
    fs::create_dir(&dir).unwrap();
    let names = ["aBc", "Abc", "abc", "ABC"];
    names.into_iter().for_each(|name| fs::write(dir.join(name), name).unwrap());
    let arguments = ["-t", "ext4", "-O", "casefold,^has_journal"];
    let Some(image) = Image::make(Some(source.path()), "8M", &arguments) else { return };
    fold(&image, "dir");
    let volume = image.open();
    let dir = volume.lookup(volume.root(), b"dir").unwrap();
    let listed = compare::names(&volume, dir);
    assert_eq!(listed.len(), 4);
    for (name, number) in &listed {
        assert_eq!(volume.lookup(dir, name), Ok(*number));
    }
    assert!(volume.lookup(dir, b"abC").is_ok());
}

#[test]
fn a_directory_inside_its_inode_folds_too() {
    let arguments = ["-t", "ext4", "-I", "512", "-O", "casefold,inline_data,^has_journal"];
    let Some(image) = Image::make(None, "8M", &arguments) else { return };
    image.debugfs_write("feature ^casefold");
    let Some(mount) = image.mount_writable() else { return };
    fill(&mount.path().join("few"), 2);
    drop(mount);
    image.debugfs_write("feature casefold");
    fold(&image, "few");
    let volume = image.open();
    let few = volume.lookup(volume.root(), b"few").unwrap();
    assert!(volume.inode(few).unwrap().is_inline());
    check_names(&volume, "few");
}

#[test]
fn unknown_encodings_are_refused() {
    let Some(image) = make(&["-b", "1024", "-O", "^metadata_csum"]) else { return };
    image.debugfs_write("set_super_value encoding 7");
    let refused = image.try_open().map(drop).unwrap_err();
    assert_eq!(refused, Error::Unsupported { feature: "needs: encoding 7".into() });
}
