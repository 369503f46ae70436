//! Volumes made by mke2fs, filled by the kernel, and checked by e2fsck.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use draconis_device::Random;
use draconis_ext::{Follow, InodeNumber, Volume};
use rustix::fs::{FallocateFlags, fallocate};

use crate::common::compare::{self, Beside};
use crate::common::{Image, run, skipped, tree};
use crate::fill::{self, FOLDED, Facts, Scale};
use crate::seen::Seen;

/// A parsed line of the table.
pub struct Combination<'a> {
    pub mke2fs: Vec<&'a str>,
    pub before: Vec<&'a str>,
    pub after: Vec<&'a str>,
}

impl<'a> Combination<'a> {
    pub fn of(line: &'a str) -> Self {
        let (line, after) = line.split_once('|').unwrap_or((line, ""));
        let (line, before) = line.split_once(" : ").unwrap_or((line, ""));
        let words = |text: &'a str| text.split_whitespace().collect();
        Self { mke2fs: words(line), before: words(before), after: words(after) }
    }

    /// Makes an empty volume; `None`, with a message, if mke2fs refuses the combination.
    pub fn make(&self, size: &str, source: Option<&Path>) -> Option<Image> {
        let dir = scratch();
        let path = dir.path().join("image");
        let source = source.map(|source| ["-d", source.to_str().unwrap()]);
        let mut words = vec!["-q", "-F"];
        words.extend(&self.mke2fs);
        words.extend(source.iter().flatten());
        words.extend([path.to_str().unwrap(), size]);
        let made = std::process::Command::new("mke2fs").args(&words).output();
        let made = made.map_err(|error| skipped(format_args!("mke2fs: {error}"))).ok()?;
        if !made.status.success() {
            skipped(format_args!("{words:?}: {}", String::from_utf8_lossy(&made.stderr).trim()));
            return None;
        }
        let image = Image { dir, path };
        tune2fs(&image, &self.before);
        Some(image)
    }
}

/// Creates a directory in memory, if available.
pub fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.unwrap()
}

/// Reference for a filled volume.
pub enum Oracle {
    /// The mounting kernel.
    Kernel,
    /// The source tree, because this kernel cannot mount the volume.
    Source(tempfile::TempDir),
}

/// A filled volume.
pub struct BuiltVolume {
    pub image: Image,
    pub facts: Facts,
    pub oracle: Oracle,
}

/// Makes and fills a volume; `None`, with a message, if impossible here.
pub fn make(line: &str, scale: Scale, random: &mut Random) -> Option<BuiltVolume> {
    let combination = Combination::of(line);
    let large = combination.mke2fs.iter().any(|it| it.len() == 5 && it.parse::<u32>().is_ok());
    let size = match scale {
        Scale::Tiny => "8M",
        _ if large => "256M",
        Scale::Usual => "64M",
        Scale::Large => "512M",
    };
    let inodes = match scale {
        Scale::Tiny => "600",
        Scale::Usual => "8000",
        // For more subdirectories than a link count holds.
        Scale::Large if line.contains("large_dir") => "90000",
        Scale::Large => "16000",
    };
    let mut with_inodes = Combination::of(line);
    with_inodes.mke2fs.extend(["-N", inodes]);
    let image = with_inodes.make(size, None)?;
    let facts = Facts::of(&image.path);
    let page = rustix::param::page_size() as u64;
    let may_not_mount = facts.has("casefold") || facts.block_bytes > page;
    if may_not_mount && !mounts(&image)? {
        return Some(from_source(&with_inodes, size, facts));
    }
    let mount = image.mount_writable()?;
    fill::fill(mount.path(), &facts, scale, random);
    drop(mount);
    let made = finish(image, &facts, &with_inodes);
    // tune2fs may have compacted the trees.
    if scale != Scale::Tiny && combination.after.is_empty() {
        assert_depth(&made, scale);
    }
    Some(made)
}

/// Returns true if the kernel mounts it; `None` without permission.
pub fn mounts(image: &Image) -> Option<bool> {
    if !rustix::process::geteuid().is_root() {
        skipped("mounting needs root");
        return None;
    }
    let dir = scratch();
    let mount = |words: &[&str]| {
        std::process::Command::new("mount").args(words).arg(image.path()).arg(dir.path()).output()
    };
    let mounted = mount(&["-o", "loop"]).unwrap().status.success();
    if mounted {
        run("umount", &[dir.path().to_str().unwrap()]);
    }
    Some(mounted)
}

fn from_source(combination: &Combination, size: &str, facts: Facts) -> BuiltVolume {
    let source = scratch();
    tree::build(source.path());
    fill::fill_source(source.path(), &facts);
    if facts.has("inline_data") {
        // mke2fs 1.47.0 would drop holes at the ends of files.
        let sparse = File::options().append(true).open(source.path().join("sparse"));
        sparse.unwrap().write_all(b"end").unwrap();
    }
    let image = combination.make(size, Some(source.path())).unwrap();
    // Unwritten blocks, and a hole.
    let mut requests = vec!["fallocate sparse 0 30".to_owned(), "punch large 2 3".to_owned()];
    let large = File::options().write(true).open(source.path().join("large")).unwrap();
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&large, hole, 2 * facts.block_bytes, 2 * facts.block_bytes).unwrap();
    if facts.has("casefold") {
        let flags = if facts.has("extent") { 0x4008_0000u32 } else { 0x4000_0000 };
        requests.push("mkdir folded".to_owned());
        requests.push(format!("sif folded flags {flags:#x}"));
        let file = source.path().join("f60");
        std::fs::create_dir(source.path().join("folded")).unwrap();
        let many = (0..400).map(|nth| format!("Name Number {nth} of many in a directory"));
        for name in FOLDED.iter().map(|(name, _)| (*name).to_owned()).chain(many) {
            requests.push(format!("write {} \"folded/{name}\"", file.display()));
            std::fs::copy(&file, source.path().join("folded").join(name)).unwrap();
        }
    }
    debugfs(&image, &requests);
    // debugfs makes no htrees; a second run of e2fsck would find its own changes.
    run("e2fsck", &["-fyD", image.path()]);
    let mut made = finish(image, &facts, combination);
    made.oracle = Oracle::Source(source);
    made
}

fn finish(image: Image, facts: &Facts, combination: &Combination) -> BuiltVolume {
    debugfs(&image, &fill::finish(facts, &combination.after));
    tune2fs(&image, &combination.after);
    judge(&image);
    let facts = Facts::of(&image.path);
    BuiltVolume { image, facts, oracle: Oracle::Kernel }
}

/// Asserts that e2fsck finds nothing.
pub fn judge(image: &Image) {
    run("e2fsck", &["-fn", image.path()]);
}

fn tune2fs(image: &Image, words: &[&str]) {
    if words.is_empty() {
        return;
    }
    // tune2fs requires a check before some changes.
    run("e2fsck", &["-fp", image.path()]);
    let all: Vec<&str> = ["-f"].iter().chain(words).copied().chain([image.path()]).collect();
    run("tune2fs", &all);
    // It leaves directories without checksum tails, and counts quotas differently.
    let again =
        ["dir_index", "metadata_csum"].iter().any(|it| words.iter().any(|word| word.contains(it)));
    run("e2fsck", &[if again { "-fyD" } else { "-fy" }, image.path()]);
}

fn debugfs(image: &Image, requests: &[String]) {
    if requests.is_empty() {
        return;
    }
    let script: PathBuf = image.dir.path().join("requests");
    std::fs::write(&script, requests.join("\n") + "\n").unwrap();
    run("debugfs", &["-w", "-f", script.to_str().unwrap(), image.path()]);
}

/// Asserts that the extent tree and the htree have the expected levels.
fn assert_depth(made: &BuiltVolume, scale: Scale) {
    let ask = |request: &str| made.image.debugfs(request).unwrap();
    if made.facts.has("extent") && !made.facts.has("bigalloc") && scale == Scale::Usual {
        let extents = ask("dump_extents fragments");
        assert!(extents.contains(" 2/ 2"), "a tree of one level:\n{extents:.500}");
    }
    if made.facts.has("dir_index") {
        let tree = ask("htree_dump \"names of one file\"");
        let levels = tree.lines().find_map(|line| line.trim().strip_prefix("Indirect levels: "));
        assert!(levels.is_some_and(|levels| levels != "0"), "{tree:.500}");
    }
}

/// Keeps a failing volume in the directory `DRACONIS_MATRIX_KEEP`; returns its name.
pub fn keep(image: &Image) -> String {
    let Some(dir) = std::env::var_os("DRACONIS_MATRIX_KEEP") else {
        return "DRACONIS_MATRIX_KEEP=DIR keeps it".into();
    };
    let name = image.dir.path().file_name().unwrap().to_string_lossy().replace('.', "image-");
    let kept = PathBuf::from(dir).join(name);
    std::fs::copy(&image.path, &kept).unwrap();
    format!("kept as {}", kept.display())
}

/// Returns the differences between the volume's reference and our view, one per line.
pub fn differences(made: &BuiltVolume) -> Vec<String> {
    let volume = match made.image.try_open() {
        Ok(volume) => volume,
        Err(error) => return vec![format!("not opened: {error}")],
    };
    match &made.oracle {
        Oracle::Kernel => {
            let mount = made.image.mount().expect("the kernel has mounted it before");
            let mut theirs = Seen::by_kernel(mount.path());
            let ours = Seen::by_us(&volume);
            let path = format!("/{}", fill::VERITY);
            theirs.set_refused(path.as_bytes(), &fill::verity_contents(), &ours);
            ours.differences(&theirs)
        }
        Oracle::Source(source) => beside_source(&volume, source.path()),
    }
}

fn beside_source(volume: &Volume, source: &Path) -> Vec<String> {
    let compared = std::panic::AssertUnwindSafe(|| {
        compare::tree(volume, InodeNumber::ROOT, source, Beside::Source);
        if !volume.info().features.iter().any(|feature| feature == "casefold") {
            return;
        }
        for (name, asked) in FOLDED {
            let path = |name: &str| format!("/folded/{name}").into_bytes();
            let found = volume.resolve(volume.root(), &path(asked), Follow::No);
            assert_eq!(found, volume.resolve(volume.root(), &path(name), Follow::No), "{asked}");
        }
        for nth in 0..400 {
            let name = format!("/folded/NAME nUMBER {nth} OF many in a DIRECTORY");
            volume.resolve(volume.root(), name.as_bytes(), Follow::No).unwrap();
        }
    });
    std::panic::catch_unwind(compared).err().map(crate::pool::message).into_iter().collect()
}
