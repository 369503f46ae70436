//! Journals of the kernel, shut down in the middle of its work.
//!
//! ```text
//!   mke2fs ─ mount ─ work ─ shut down ─┬─ the kernel recovers a copy ─┐
//!                                      ├─ e2fsck recovers a copy ─────┼─ the same tree
//!                                      └─ we read it as it is ────────┘
//! ```

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::PathBuf;

use draconis_device::Random;
use rustix::fs::{FallocateFlags, XattrFlags, fallocate};

use crate::common::tree::random_bytes;
use crate::common::{Image, report_skipped, run_tool};
use crate::matrix::fill::Dumpe2fsInfo;
use crate::matrix::ioctl::{self, ShutdownMode};
use crate::matrix::made::{
    FeatureCombination, assert_fsck_clean, can_kernel_mount, keep_failing_image, scratch_dir,
};
use crate::matrix::seen::VolumeView;

/// Options for mke2fs, and mount options.
#[rustfmt::skip]
pub const JOURNAL_VOLUMES: &[(&str, &str)] = &[
    ("-t ext3 -b 1024 -J size=1", ""),
    ("-t ext3 -b 2048", "data=journal"),
    ("-t ext3 -b 1024 -O huge_file -J size=2", "journal_checksum"),
    ("-t ext3 -b 4096 -O huge_file", "data=writeback,journal_async_commit"),
    ("-t ext3 -b 1024 -O metadata_csum", ""),
    ("-t ext3 -b 1024 -O uninit_bg,flex_bg", "data=journal"),
    ("-t ext3 -b 1024 -O orphan_file", ""),
    ("-t ext4 -b 1024 -J size=1", ""),
    ("-t ext4 -b 2048 -J size=2", "data=writeback"),
    ("-t ext4 -b 4096", ""),
    ("-t ext4 -b 4096", "data=journal"),
    ("-t ext4 -b 1024", "data=journal"),
    ("-t ext4 -b 4096", "data=writeback,journal_async_commit"),
    ("-t ext4 -b 1024 -O ^64bit", ""),
    ("-t ext4 -b 1024 -O ^metadata_csum", ""),
    ("-t ext4 -b 4096 -O ^metadata_csum,^64bit,uninit_bg", "journal_checksum"),
    ("-t ext4 -b 1024 -O ^metadata_csum,uninit_bg", "data=journal"),
    ("-t ext4 -b 1024 -O metadata_csum_seed,meta_bg,^resize_inode", ""),
    ("-t ext4 -b 1024 -O orphan_file", ""),
    ("-t ext4 -b 4096 -O bigalloc -C 16384", ""),
    ("-t ext4 -b 1024 -O inline_data,ea_inode -I 512", ""),
    ("-t ext4 -b 4096 -O fast_commit", ""),
    // Not with inline_data: Linux 6.18 miscounts the blocks of files that leave their inodes this
    // way.
    ("-t ext4 -b 1024 -O fast_commit,^metadata_csum", ""),
];

/// A volume whose journal needs replay.
pub struct DirtyVolume {
    pub image: Image,
    pub facts: Dumpe2fsInfo,
}

/// Works on a volume and shuts it down; `None`, with a message, if impossible here.
pub fn make_dirty_volume(
    line: &str,
    options: &str,
    how: ShutdownMode,
    random: &mut Random,
) -> Option<DirtyVolume> {
    let mut combination = FeatureCombination::parse_line(line);
    combination.mke2fs.extend(["-N", "2000"]);
    let image = combination.make_image("32M", None)?;
    let mount = image.mount_with(&format!("loop,{options}"))?;
    let root = mount.path();
    let handle = File::open(root).unwrap();
    let mut work = RandomWorkload { root: root.to_owned(), made: Vec::new(), next: 0 };
    for nth in 0..STEPS_PER_OBSERVATION {
        work.random_change(random);
        if nth % 97 == 60 {
            rustix::fs::syncfs(&handle).unwrap();
        }
    }
    // Orphans in use.
    let orphans: Vec<File> = (0..3)
        .map(|nth| {
            let path = root.join(format!("orphan {nth}"));
            fs::write(&path, random_bytes(nth, 70_000)).unwrap();
            let file = File::open(&path).unwrap();
            fs::remove_file(&path).unwrap();
            file
        })
        .collect();
    File::open(root.join("kept")).unwrap().sync_all().unwrap();
    for _ in 0..STEPS_PER_OBSERVATION / 8 {
        work.random_change(random);
    }
    if line.contains("fast_commit") {
        rustix::fs::syncfs(&handle).unwrap();
        work.make_fast_commits(random);
    }
    if let Err(error) = ioctl::shut_down(&handle, how) {
        report_skipped(format_args!("shutting a mount down: {error}"));
        return None;
    }
    drop((orphans, handle, mount));
    let facts = Dumpe2fsInfo::from_image(&image.path);
    assert!(facts.has_feature("needs_recovery"), "nothing is left to recover");
    Some(DirtyVolume { image, facts })
}

/// Returns the differences between the three recoveries, one per line. `None` without a reference:
/// Linux 6.18 does not recover all of its fast commits.
pub fn recovery_differences(dirty: &DirtyVolume) -> Option<Vec<String>> {
    let recovered = copy_image(&dirty.image);
    // Mounting recovers; the second mount shows what the first wrote.
    if !can_kernel_mount(&recovered)? {
        let kept = keep_failing_image(&dirty.image);
        assert!(
            dirty.facts.has_feature("fast_commit"),
            "the kernel does not recover its journal; {kept}"
        );
        println!("the kernel does not recover its own fast commits; {kept}");
        return None;
    }
    assert_fsck_clean(&recovered);
    let theirs = draconis_view(&recovered);
    let mut lines = Vec::new();
    // e2fsck 1.47.0 cannot read all fast commits of the kernel.
    if !dirty.facts.has_feature("fast_commit") {
        let checked = copy_image(&dirty.image);
        run_tool("e2fsck", &["-fy", "-E", "no_optimize_extents", checked.path()]);
        assert_fsck_clean(&checked);
        let of_e2fsck = draconis_view(&checked).differences_from(&theirs);
        lines.extend(of_e2fsck.into_iter().map(|line| format!("by e2fsck: {line}")));
    }
    let before = fs::read(&dirty.image.path).unwrap();
    match dirty.image.try_open() {
        Ok(volume) => {
            let mut ours = VolumeView::from_draconis(&volume);
            // The kernel has freed the orphans' space; we change nothing.
            ours.space.clone_from(&theirs.space);
            if dirty.facts.has_feature("fast_commit") {
                ours.copy_directory_times(&theirs);
            }
            lines.extend(ours.differences_from(&theirs));
        }
        Err(error) => lines.push(format!("not opened: {error}")),
    }
    assert!(fs::read(&dirty.image.path).unwrap() == before, "reading has changed the image");
    Some(lines)
}

fn draconis_view(image: &Image) -> VolumeView {
    VolumeView::from_kernel(image.mount().expect("it was mounted before").path())
}

fn copy_image(image: &Image) -> Image {
    let dir = scratch_dir();
    let path = dir.path().join("image");
    fs::copy(&image.path, &path).unwrap();
    Image { dir, path }
}

/// Steps between two observations of the commits.
const STEPS_PER_OBSERVATION: usize = 700;
/// Magic number of journal blocks; contents that begin with it must be told apart.
const JOURNAL_MAGIC: [u8; 4] = [0xC0, 0x3B, 0x39, 0x98];

/// Random changes, some of them synced.
struct RandomWorkload {
    root: PathBuf,
    made: Vec<PathBuf>,
    next: u64,
}

impl RandomWorkload {
    fn random_change(&mut self, random: &mut Random) {
        self.next += 1;
        let name = format!("{} {}", "name".repeat(random.next_below(50) as usize), self.next);
        let fresh = self.root.join(format!("d{}", random.next_below(6))).join(name);
        fs::create_dir_all(fresh.parent().unwrap()).unwrap();
        let some = self.random_path(random);
        let len = 1 + random.next_below(40_000);
        let step = random.next_below(17);
        match (step, some) {
            (0..=3, _) | (_, None) => {
                fs::write(&fresh, file_contents(self.next, len)).unwrap();
                self.made.push(fresh);
            }
            (4 | 5, Some(path)) => {
                let file = File::options().write(true).open(path).unwrap();
                file.write_all_at(&file_contents(self.next, len), random.next_below(200_000))
                    .unwrap();
                if step == 5 {
                    file.sync_data().unwrap();
                }
            }
            (6, Some(path)) => {
                let file = File::options().write(true).open(path).unwrap();
                file.set_len(random.next_below(60_000)).unwrap();
            }
            (7 | 8, Some(path)) => {
                fs::remove_file(path).unwrap();
                self.made.retain(|it| it.exists());
            }
            (9, Some(path)) => {
                fs::rename(path, &fresh).unwrap();
                self.made.retain(|it| it.exists());
                self.made.push(fresh);
            }
            (10, Some(path)) => {
                fs::hard_link(path, &fresh).unwrap();
                self.made.push(fresh);
            }
            (11, _) => symlink("t".repeat(random.next_below(90) as usize + 1), &fresh).unwrap(),
            (12, Some(path)) => {
                let value = random_bytes(self.next % 5, random.next_below(600) as usize);
                let _ = rustix::fs::setxattr(&path, "user.work", &value, XattrFlags::empty());
            }
            (13, Some(path)) => {
                let file = File::options().write(true).open(path).unwrap();
                let at = random.next_below(100_000);
                let _ = fallocate(&file, FallocateFlags::empty(), at, len);
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(&file, hole, at / 2, len / 2);
            }
            // Directories whose blocks become data blocks.
            (14, _) => {
                fs::create_dir(&fresh).unwrap();
                for nth in 0..20 {
                    fs::write(fresh.join("n".repeat(nth * 7 + 1)), b"").unwrap();
                }
                if self.next.is_multiple_of(2) {
                    fs::remove_dir_all(&fresh).unwrap();
                }
            }
            (15, Some(path)) => File::open(path).unwrap().sync_all().unwrap(),
            (_, Some(_)) => {
                fs::write(self.root.join("kept"), file_contents(self.next, 3000)).unwrap()
            }
        }
    }

    /// Makes changes that the kernel commits with one fast commit each, if supported.
    fn make_fast_commits(&mut self, random: &mut Random) {
        let dir = self.root.join("fast");
        fs::create_dir(&dir).unwrap();
        File::open(&dir).unwrap().sync_all().unwrap();
        // Each takes a block, and a journal has few for them; then the kernel makes a full commit.
        for nth in 0..6 {
            let path = dir.join(format!("file {nth}"));
            let file = File::create(&path).unwrap();
            file.write_all_at(&file_contents(nth, 1 + random.next_below(30_000)), 0).unwrap();
            file.sync_all().unwrap();
            match nth % 4 {
                0 => fs::hard_link(&path, dir.join(format!("linked {nth}"))).unwrap(),
                1 => file.set_len(random.next_below(9_000)).unwrap(),
                2 => fs::remove_file(dir.join(format!("file {}", nth - 1))).unwrap(),
                _ => file.write_all_at(&file_contents(nth, 5_000), 60_000).unwrap(),
            }
            file.sync_all().unwrap();
        }
    }

    fn random_path(&self, random: &mut Random) -> Option<PathBuf> {
        let count = self.made.len() as u64;
        (count > 0).then(|| self.made[random.next_below(count) as usize].clone())
    }
}

fn file_contents(seed: u64, len: u64) -> Vec<u8> {
    let mut contents = random_bytes(seed, len as usize);
    if seed.is_multiple_of(3) {
        for block in contents.chunks_mut(1024) {
            let len = block.len().min(JOURNAL_MAGIC.len());
            block[..len].copy_from_slice(&JOURNAL_MAGIC[..len]);
        }
    }
    contents
}
