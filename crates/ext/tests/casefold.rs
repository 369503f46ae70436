//! Case-insensitive names, compared with e2fsprogs, whose tables are the kernel's.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::{Image, compare, run_tool};
use draconis_device::Random;
use draconis_ext::format::casefold;
use draconis_ext::format::hash::{HashSeed, NameHash};
use draconis_ext::format::inode::flags;
use draconis_ext::{Error, Volume};

/// Offset of `s_encoding_flags`.
const ENCODING_FLAGS_AT: u64 = 1024 + 0x27E;
/// Names per `debugfs` process.
const NAMES_PER_DEBUGFS_RUN: usize = 100_000;

/// Returns the hashes of the folded names from `debugfs`; `None`, with a message, without it.
fn debugfs_hashes(image: &Image, names: &[String]) -> Option<Vec<u32>> {
    let mut script = tempfile::NamedTempFile::new().unwrap();
    for name in names {
        writeln!(script, "dx_hash -h half_md4 -c -e utf8 {name}").unwrap();
    }
    let text = run_tool("debugfs", &["-f", script.path().to_str().unwrap(), image.path()])?;
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
    assert_eq!(found.len(), names.len());
    Some(found)
}

/// Checks that each name folds as in e2fsprogs; returns how many names folding changed.
fn check_hashes_match_debugfs(image: &Image, names: &[String]) -> Option<u64> {
    let hash = NameHash::of_version(1, false, HashSeed::new([0; 4])).unwrap();
    let mut changed = 0;
    for batch in names.chunks(NAMES_PER_DEBUGFS_RUN) {
        for (name, theirs) in batch.iter().zip(debugfs_hashes(image, batch)?) {
            let folded = casefold::fold_name(name.as_bytes());
            let bytes = folded.as_deref().unwrap_or(name.as_bytes());
            assert_eq!(hash.hash_name(bytes), theirs, "{}", name.escape_unicode());
            changed += u64::from(bytes != name.as_bytes());
        }
    }
    Some(changed)
}

/// Returns true if a `debugfs` request can contain the character.
fn is_allowed_in_debugfs_request(point: char) -> bool {
    !point.is_control() && !point.is_whitespace() && !matches!(point, '"' | '\\' | '/')
}

/// Skips empty planes; these and private use are sampled, one code point in sixteen.
fn is_sampled_code_point(point: char) -> bool {
    point < '\u{30000}' || ('\u{E0000}'..'\u{E2000}').contains(&point)
}

#[test]
fn every_character_folds_as_in_e2fsprogs() {
    let Some(image) = Image::make(None, "1M", &[]) else { return };
    let names: Vec<String> = ('!'..=char::MAX)
        .filter(|point| {
            is_allowed_in_debugfs_request(*point)
                && (is_sampled_code_point(*point) || u32::from(*point) % 16 == 0)
        })
        .map(|point| format!("X{point}\u{307}"))
        .collect();
    let Some(changed) = check_hashes_match_debugfs(&image, &names) else { return };
    assert!(changed > 200_000, "{changed}");
}

#[test]
fn character_sequences_fold_as_in_e2fsprogs() {
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
            for _ in 0..=random.next_below(8) {
                let (first, last) = ranges[random.next_below(ranges.len() as u64) as usize];
                let point = first + random.next_below(u64::from(last - first) + 1) as u32;
                name.extend(
                    char::from_u32(point).filter(|point| is_allowed_in_debugfs_request(*point)),
                );
            }
            name
        })
        .collect();
    check_hashes_match_debugfs(&image, &names);
}

/// Returns names in two equivalent forms.
fn equivalent_name_pairs(count: u32) -> Vec<(String, String)> {
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

const INVALID_UTF8_NAME: &[u8] = b"No Text \xFF";

fn create_files(dir: &Path, count: u32) {
    fs::create_dir(dir).unwrap();
    for (name, _) in equivalent_name_pairs(count) {
        fs::write(dir.join(&name), &name).unwrap();
    }
    fs::write(dir.join(OsStr::from_bytes(INVALID_UTF8_NAME)), b"").unwrap();
}

/// Makes a directory case-insensitive.
fn set_casefold_flag(image: &Image, name: &str) {
    let volume = image.open();
    let inode = volume.inode(volume.lookup(volume.root(), name.as_bytes()).unwrap()).unwrap();
    let all = inode.flags | flags::CASEFOLD;
    image.debugfs_write(&format!("set_inode_field {name} flags {all:#x}"));
}

/// Makes an image with two case-insensitive directories, of one block and with an htree, and a
/// plain one.
fn make_casefold_image(arguments: &[&str]) -> Option<Image> {
    let source = tempfile::tempdir().unwrap();
    for (name, count) in [("few", 2), ("many", 60), ("plain", 10)] {
        create_files(&source.path().join(name), count);
    }
    let mut all = vec!["-t", "ext4", "-O", "casefold,^has_journal"];
    all.extend(arguments);
    let image = Image::make(Some(source.path()), "8M", &all)?;
    ["few", "many"].into_iter().for_each(|name| set_casefold_flag(&image, name));
    // Rebuilds the htree with folded names.
    run_tool("e2fsck", &["-fyD", image.path()])?;
    run_tool("e2fsck", &["-fn", image.path()])?;
    Some(image)
}

/// Checks that every name is found in both forms, and no other name is.
fn check_names(volume: &Volume, dir: &str) {
    let dir = volume.lookup(volume.root(), dir.as_bytes()).unwrap();
    let listed = compare::list_names(volume, dir);
    let pairs = equivalent_name_pairs(listed.len() as u32 / 4);
    assert_eq!(listed.len(), pairs.len() + 1);
    for (name, other) in &pairs {
        let number = listed[name.as_bytes()];
        assert_eq!(volume.lookup(dir, name.as_bytes()), Ok(number), "{name}");
        assert_eq!(volume.lookup(dir, other.as_bytes()), Ok(number), "{other}");
        let neither = format!("{other}x");
        assert_eq!(volume.lookup(dir, neither.as_bytes()), Err(Error::NotFound), "{neither}");
    }
    assert_eq!(volume.lookup(dir, INVALID_UTF8_NAME), Ok(listed[INVALID_UTF8_NAME]));
    assert_eq!(volume.lookup(dir, b"NO TEXT \xFF"), Err(Error::NotFound));
    assert_eq!(volume.lookup(dir, b"."), Ok(dir));
}

#[test]
fn casefolded_names_are_found_in_both_forms() {
    for arguments in [&["-b", "1024"][..], &["-b", "4096"], &["-b", "1024", "-O", "^metadata_csum"]]
    {
        let Some(image) = make_casefold_image(arguments) else { return };
        let volume = image.open();
        ["few", "many"].into_iter().for_each(|dir| check_names(&volume, dir));
        let plain = volume.lookup(volume.root(), b"plain").unwrap();
        assert!(volume.lookup(plain, b"ReadMe 1.TXT").is_ok());
        assert_eq!(volume.lookup(plain, b"readme 1.txt"), Err(Error::NotFound));
        assert_eq!(volume.lookup(volume.root(), b"FEW"), Err(Error::NotFound));
    }
}

#[test]
fn strict_volume_rejects_invalid_utf8_names() {
    let Some(image) = make_casefold_image(&["-b", "1024", "-E", "encoding_flags=strict"]) else {
        return;
    };
    let volume = image.open();
    let few = volume.lookup(volume.root(), b"few").unwrap();
    assert!(volume.lookup(few, b"readme 1.txt").is_ok());
    assert!(matches!(volume.lookup(few, b"\xFF"), Err(Error::Misuse(_))));
    let plain = volume.lookup(volume.root(), b"plain").unwrap();
    assert!(volume.lookup(plain, INVALID_UTF8_NAME).is_ok());
}

#[test]
fn wrongly_hashed_names_are_found_by_linear_fallback() {
    let Some(image) = make_casefold_image(&["-b", "1024", "-O", "^metadata_csum"]) else { return };
    // The htree of this image keeps the hashes of unfolded names.
    let source = tempfile::tempdir().unwrap();
    create_files(&source.path().join("many"), 60);
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "casefold,^has_journal,^metadata_csum"];
    let Some(other) = Image::make(Some(source.path()), "8M", &arguments) else { return };
    run_tool("e2fsck", &["-fyD", other.path()]);
    set_casefold_flag(&other, "many");
    [&image, &other].into_iter().for_each(|image| check_names(&image.open(), "many"));
    for image in [&image, &other] {
        let file = fs::File::options().write(true).open(&image.path).unwrap();
        file.write_all_at(&casefold::FLAG_NO_COMPAT_FALLBACK.to_le_bytes(), ENCODING_FLAGS_AT)
            .unwrap();
    }
    check_names(&image.open(), "many");
    let volume = other.open();
    let many = volume.lookup(volume.root(), b"many").unwrap();
    let found = |(name, _): &(String, String)| volume.lookup(many, name.as_bytes()).is_ok();
    let pairs = equivalent_name_pairs(60);
    let count = pairs.iter().filter(|pair| found(pair)).count();
    assert!(count < pairs.len() / 2, "{count}");
}

#[test]
fn exact_match_wins_among_equivalent_names() {
    let source = tempfile::tempdir().unwrap();
    let dir = source.path().join("dir");
    fs::create_dir(&dir).unwrap();
    let names = ["aBc", "Abc", "abc", "ABC"];
    names.into_iter().for_each(|name| fs::write(dir.join(name), name).unwrap());
    let arguments = ["-t", "ext4", "-O", "casefold,^has_journal"];
    let Some(image) = Image::make(Some(source.path()), "8M", &arguments) else { return };
    set_casefold_flag(&image, "dir");
    let volume = image.open();
    let dir = volume.lookup(volume.root(), b"dir").unwrap();
    let listed = compare::list_names(&volume, dir);
    assert_eq!(listed.len(), 4);
    for (name, number) in &listed {
        assert_eq!(volume.lookup(dir, name), Ok(*number));
    }
    assert!(volume.lookup(dir, b"abC").is_ok());
}

#[test]
fn inline_directory_is_case_insensitive() {
    let arguments = ["-t", "ext4", "-I", "512", "-O", "casefold,inline_data,^has_journal"];
    let Some(image) = Image::make(None, "8M", &arguments) else { return };
    image.debugfs_write("feature ^casefold");
    let Some(mount) = image.mount_writable() else { return };
    create_files(&mount.path().join("few"), 2);
    drop(mount);
    image.debugfs_write("feature casefold");
    set_casefold_flag(&image, "few");
    let volume = image.open();
    let few = volume.lookup(volume.root(), b"few").unwrap();
    assert!(volume.inode(few).unwrap().is_inline());
    check_names(&volume, "few");
}

#[test]
fn unknown_encodings_are_refused() {
    let Some(image) = make_casefold_image(&["-b", "1024", "-O", "^metadata_csum"]) else { return };
    image.debugfs_write("set_super_value encoding 7");
    let refused = image.try_open().map(drop).unwrap_err();
    assert_eq!(refused, Error::Unsupported { feature: "needs: encoding 7".into() });
}
