//! Volumes made by mke2fs, filled by the kernel, and checked by e2fsck.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use draconis_device::Random;
use draconis_ext::{Follow, InodeNumber, Volume};
use rustix::fs::{FallocateFlags, fallocate};

use crate::common::compare::{self, ReferenceTree};
use crate::common::{Image, report_skipped, run_tool, tree};
use crate::matrix::fill::{self, DataScale, Dumpe2fsInfo, EQUIVALENT_NAMES};
use crate::matrix::seen::VolumeView;

/// A parsed line of the table.
pub struct FeatureCombination<'a> {
    pub mke2fs: Vec<&'a str>,
    pub before: Vec<&'a str>,
    pub after: Vec<&'a str>,
}

impl<'a> FeatureCombination<'a> {
    pub fn parse_line(line: &'a str) -> Self {
        let (line, after) = line.split_once('|').unwrap_or((line, ""));
        let (line, before) = line.split_once(" : ").unwrap_or((line, ""));
        let words = |text: &'a str| text.split_whitespace().collect();
        Self { mke2fs: words(line), before: words(before), after: words(after) }
    }

    /// Makes an empty volume; `None`, with a message, if mke2fs refuses the combination.
    pub fn make_image(&self, size: &str, source: Option<&Path>) -> Option<Image> {
        let dir = scratch_dir();
        let path = dir.path().join("image");
        let source = source.map(|source| ["-d", source.to_str().unwrap()]);
        let mut words = vec!["-q", "-F"];
        words.extend(&self.mke2fs);
        words.extend(source.iter().flatten());
        words.extend([path.to_str().unwrap(), size]);
        let made = std::process::Command::new("mke2fs").args(&words).output();
        let made = made.map_err(|error| report_skipped(format_args!("mke2fs: {error}"))).ok()?;
        if !made.status.success() {
            report_skipped(format_args!(
                "{words:?}: {}",
                String::from_utf8_lossy(&made.stderr).trim()
            ));
            return None;
        }
        let image = Image { dir, path };
        run_tune2fs(&image, &self.before);
        Some(image)
    }
}

/// Creates a directory in memory, if available.
pub fn scratch_dir() -> tempfile::TempDir {
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
    pub facts: Dumpe2fsInfo,
    pub oracle: Oracle,
}

/// Makes and fills a volume; `None`, with a message, if impossible here.
pub fn make_volume(line: &str, scale: DataScale, random: &mut Random) -> Option<BuiltVolume> {
    let combination = FeatureCombination::parse_line(line);
    let large = combination.mke2fs.iter().any(|it| it.len() == 5 && it.parse::<u32>().is_ok());
    let size = match scale {
        DataScale::Tiny => "8M",
        _ if large => "256M",
        DataScale::Usual => "64M",
        DataScale::Large => "512M",
    };
    let inodes = match scale {
        DataScale::Tiny => "600",
        DataScale::Usual => "8000",
        // For more subdirectories than a link count holds.
        DataScale::Large if line.contains("large_dir") => "90000",
        DataScale::Large => "16000",
    };
    let mut with_inodes = FeatureCombination::parse_line(line);
    with_inodes.mke2fs.extend(["-N", inodes]);
    let image = with_inodes.make_image(size, None)?;
    let facts = Dumpe2fsInfo::from_image(&image.path);
    let page = rustix::param::page_size() as u64;
    let may_not_mount = facts.has_feature("casefold") || facts.block_bytes > page;
    if may_not_mount && !can_kernel_mount(&image)? {
        return Some(make_from_source(&with_inodes, size, facts));
    }
    let mount = image.mount_writable()?;
    fill::fill_volume(mount.path(), &facts, scale, random);
    drop(mount);
    let made = finish_volume(image, &facts, &with_inodes);
    // tune2fs may have compacted the trees.
    if scale != DataScale::Tiny && combination.after.is_empty() {
        assert_tree_depths(&made, scale);
    }
    Some(made)
}

/// Returns true if the kernel mounts it; `None` without permission.
pub fn can_kernel_mount(image: &Image) -> Option<bool> {
    if !rustix::process::geteuid().is_root() {
        report_skipped("mounting needs root");
        return None;
    }
    Some(image.try_mount("loop").is_ok())
}

fn make_from_source(
    combination: &FeatureCombination,
    size: &str,
    facts: Dumpe2fsInfo,
) -> BuiltVolume {
    let source = scratch_dir();
    tree::build_tree(source.path());
    fill::fill_source(source.path(), &facts);
    if facts.has_feature("inline_data") {
        // mke2fs 1.47.0 would drop holes at the ends of files.
        let sparse = File::options().append(true).open(source.path().join("sparse"));
        sparse.unwrap().write_all(b"end").unwrap();
    }
    let image = combination.make_image(size, Some(source.path())).unwrap();
    // Unwritten blocks, and a hole.
    let mut requests = vec!["fallocate sparse 0 30".to_owned(), "punch large 2 3".to_owned()];
    let large = File::options().write(true).open(source.path().join("large")).unwrap();
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&large, hole, 2 * facts.block_bytes, 2 * facts.block_bytes).unwrap();
    if facts.has_feature("casefold") {
        let flags = if facts.has_feature("extent") { 0x4008_0000u32 } else { 0x4000_0000 };
        requests.push("mkdir folded".to_owned());
        requests.push(format!("sif folded flags {flags:#x}"));
        let file = source.path().join("f60");
        std::fs::create_dir(source.path().join("folded")).unwrap();
        let many = (0..400).map(|nth| format!("Name Number {nth} of many in a directory"));
        for name in EQUIVALENT_NAMES.iter().map(|(name, _)| (*name).to_owned()).chain(many) {
            requests.push(format!("write {} \"folded/{name}\"", file.display()));
            std::fs::copy(&file, source.path().join("folded").join(name)).unwrap();
        }
    }
    run_debugfs(&image, &requests);
    // debugfs makes no htrees; a second run of e2fsck would find its own changes.
    run_tool("e2fsck", &["-fyD", image.path()]);
    let mut made = finish_volume(image, &facts, combination);
    made.oracle = Oracle::Source(source);
    made
}

fn finish_volume(
    image: Image,
    facts: &Dumpe2fsInfo,
    combination: &FeatureCombination,
) -> BuiltVolume {
    run_debugfs(&image, &fill::debugfs_finish_requests(facts, &combination.after));
    run_tune2fs(&image, &combination.after);
    assert_fsck_clean(&image);
    let facts = Dumpe2fsInfo::from_image(&image.path);
    BuiltVolume { image, facts, oracle: Oracle::Kernel }
}

/// Asserts that e2fsck finds nothing.
pub fn assert_fsck_clean(image: &Image) {
    run_tool("e2fsck", &["-fn", image.path()]);
}

fn run_tune2fs(image: &Image, words: &[&str]) {
    if words.is_empty() {
        return;
    }
    // tune2fs requires a check before some changes.
    run_tool("e2fsck", &["-fp", image.path()]);
    let all: Vec<&str> = ["-f"].iter().chain(words).copied().chain([image.path()]).collect();
    run_tool("tune2fs", &all);
    // It leaves directories without checksum tails, and counts quotas differently.
    let again =
        ["dir_index", "metadata_csum"].iter().any(|it| words.iter().any(|word| word.contains(it)));
    run_tool("e2fsck", &[if again { "-fyD" } else { "-fy" }, image.path()]);
}

fn run_debugfs(image: &Image, requests: &[String]) {
    if requests.is_empty() {
        return;
    }
    let script: PathBuf = image.dir.path().join("requests");
    std::fs::write(&script, requests.join("\n") + "\n").unwrap();
    run_tool("debugfs", &["-w", "-f", script.to_str().unwrap(), image.path()]);
}

/// Asserts that the extent tree and the htree have the expected levels.
fn assert_tree_depths(made: &BuiltVolume, scale: DataScale) {
    let ask = |request: &str| made.image.debugfs(request).unwrap();
    if made.facts.has_feature("extent")
        && !made.facts.has_feature("bigalloc")
        && scale == DataScale::Usual
    {
        let extents = ask("dump_extents fragments");
        assert!(extents.contains(" 2/ 2"), "a tree of one level:\n{extents:.500}");
    }
    if made.facts.has_feature("dir_index") {
        let tree = ask("htree_dump \"names of one file\"");
        let levels = tree.lines().find_map(|line| line.trim().strip_prefix("Indirect levels: "));
        assert!(levels.is_some_and(|levels| levels != "0"), "{tree:.500}");
    }
}

/// Keeps a failing volume in the directory `DRACONIS_MATRIX_KEEP`; returns its name.
pub fn keep_failing_image(image: &Image) -> String {
    let Some(dir) = std::env::var_os("DRACONIS_MATRIX_KEEP") else {
        return "DRACONIS_MATRIX_KEEP=DIR keeps it".into();
    };
    let name = image.dir.path().file_name().unwrap().to_string_lossy().replace('.', "image-");
    let kept = PathBuf::from(dir).join(name);
    std::fs::copy(&image.path, &kept).unwrap();
    format!("kept as {}", kept.display())
}

/// Returns the differences between the volume's reference and our view, one per line.
pub fn view_differences(made: &BuiltVolume) -> Vec<String> {
    let volume = match made.image.try_open() {
        Ok(volume) => volume,
        Err(error) => return vec![format!("not opened: {error}")],
    };
    match &made.oracle {
        Oracle::Kernel => {
            let mount = made.image.mount().expect("the kernel has mounted it before");
            let mut theirs = VolumeView::from_kernel(mount.path());
            let ours = VolumeView::from_draconis(&volume);
            let path = format!("/{}", fill::VERITY_FILE);
            theirs.fill_in_refused_file(path.as_bytes(), &fill::verity_contents(), &ours);
            ours.differences_from(&theirs)
        }
        Oracle::Source(source) => differences_from_source(&volume, source.path()),
    }
}

fn differences_from_source(volume: &Volume, source: &Path) -> Vec<String> {
    let compared = std::panic::AssertUnwindSafe(|| {
        compare::compare_trees(volume, InodeNumber::ROOT, source, ReferenceTree::Source);
        if !volume.info().features.iter().any(|feature| feature == "casefold") {
            return;
        }
        for (name, asked) in EQUIVALENT_NAMES {
            let path = |name: &str| format!("/folded/{name}").into_bytes();
            let found = volume.resolve(volume.root(), &path(asked), Follow::No);
            assert_eq!(found, volume.resolve(volume.root(), &path(name), Follow::No), "{asked}");
        }
        for nth in 0..400 {
            let name = format!("/folded/NAME nUMBER {nth} OF many in a DIRECTORY");
            volume.resolve(volume.root(), name.as_bytes(), Follow::No).unwrap();
        }
    });
    std::panic::catch_unwind(compared)
        .err()
        .map(crate::matrix::pool::panic_message)
        .into_iter()
        .collect()
}
