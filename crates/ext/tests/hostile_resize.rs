//! Growing, shrinking and tuning damaged images, and damaged redo logs: no panic, no hang, bounded
//! memory.

use std::sync::{Arc, OnceLock};

use crate::common::Image;
use crate::common::spoil::{
    assert_peak_memory_is_small, build_small_tree, corrupt_field, metadata_ranges, scaled_rounds,
};
use draconis_device::{Disk, MemoryDisk, Random};
use draconis_ext::grow::GrowPlan;
use draconis_ext::shrink::ShrinkPlan;
use draconis_ext::tune::{TuneChanges, tune};
use draconis_testkit::wait::HangClock;
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};
use draconis_types::Time;

const NOW: Time = Time { seconds: 1_700_000_000, nanoseconds: 0 };
const IMAGE_BYTES: u64 = 12 << 20;

fn base_images() -> &'static [Vec<u8>] {
    static BASES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    BASES.get_or_init(|| {
        let source = tempfile::tempdir().unwrap();
        build_small_tree(source.path());
        let makes: [&[&str]; 5] = [
            &["-t", "ext2", "-b", "1024", "-g", "1024"],
            &["-t", "ext3", "-b", "1024", "-g", "2048", "-O", "^sparse_super,^resize_inode"],
            // Without checksums damage is not detected early.
            &["-t", "ext4", "-b", "1024", "-g", "1024", "-O", "^metadata_csum"],
            &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,meta_bg,^resize_inode,quota"],
            &["-t", "ext4", "-b", "4096", "-O", "^metadata_csum,sparse_super2,inline_data"],
        ];
        let made = makes.iter().filter_map(|arguments| {
            let image = Image::make(Some(source.path()), "12M", arguments)?;
            draconis_testkit::judge::e2fsck("-fy", &image.path);
            Some(std::fs::read(&image.path).unwrap())
        });
        made.collect()
    })
}

/// Makes all offline changes, one after the other; returns how many succeeded.
fn apply_all_offline_changes(image: &[u8]) -> u32 {
    let mut made = 0;
    let mut bytes = image.to_vec();
    bytes.resize(2 * IMAGE_BYTES as usize, 0);
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes, 512));
    let _ = draconis_ext::finish_interrupted_change(&*disk);
    for size in [None, Some(IMAGE_BYTES / 2), Some(IMAGE_BYTES - 300_000)] {
        let Ok(shrinking) = ShrinkPlan::plan(&disk, size) else { continue };
        let target =
            draconis_ext::shrink::ShrinkTarget { disk: &*disk, now: NOW, progress: &|_| () };
        made += u32::from(shrinking.write(&target).is_ok());
    }
    let features = ["^has_journal", "has_journal", "^metadata_csum", "dir_index", "flex_bg"];
    for feature in features {
        let features = vec![feature.to_owned()];
        let changes = TuneChanges { features, uuid: Some([7; 16]), ..TuneChanges::default() };
        made += u32::from(tune(&disk, &changes, NOW).is_ok());
    }
    for size in [IMAGE_BYTES + 5000, 2 * IMAGE_BYTES] {
        let Ok(growth) = GrowPlan::plan(&disk, size) else { continue };
        let (zeroed_from_bytes, progress) = (u64::MAX, &|_| ());
        let target =
            draconis_ext::grow::GrowTarget { disk: &*disk, zeroed_from_bytes, now: NOW, progress };
        made += u32::from(growth.write(&target).is_ok());
    }
    made
}

fn run_offline_changes_with_timeout(what: &str, image: &[u8]) -> u32 {
    let clock = HangClock::start();
    let made = std::panic::catch_unwind(|| apply_all_offline_changes(image));
    clock.assert_not_hung(format_args!("{what}"));
    made.unwrap_or_else(|_| panic!("{what}: panicked"))
}

#[test]
#[ignore = "long: a minute: hundreds of volumes"]
fn damaged_volumes_are_resized_or_refused() {
    draconis_testkit::in_own_process!();
    let (mut made, mut random) = (0, Random::new(11));
    for (nth, base) in base_images().iter().enumerate() {
        assert!(run_offline_changes_with_timeout(&format!("{nth}, whole"), base) > 5, "{nth}");
        let structures = metadata_ranges(base);
        for seed in 0..scaled_rounds(60) {
            let mut image = base.clone();
            for _ in 0..=random.next_below(3) {
                let range = structures[random.next_below(structures.len() as u64) as usize].clone();
                corrupt_field(&mut image, range, &mut random);
            }
            made += run_offline_changes_with_timeout(&format!("{nth}, {seed}"), &image);
        }
    }
    assert!(made > 0 || base_images().is_empty(), "nothing was changed");
    assert_peak_memory_is_small();
}

#[test]
fn damaged_redo_logs_terminate() {
    draconis_testkit::in_own_process!();
    let Some(base) = base_images().first() else { return };
    let recorded = Arc::new(RecordDisk::new(MemoryDisk::new(base.clone(), 512)));
    let disk: Arc<dyn Disk> = recorded.clone();
    let shrinking = ShrinkPlan::plan(&disk, Some(IMAGE_BYTES / 2)).unwrap();
    let target = draconis_ext::shrink::ShrinkTarget { disk: &*disk, now: NOW, progress: &|_| () };
    shrinking.write(&target).unwrap();
    let options = CrashOptions { seed: 7, subsets: 1, exhaustive_sectors: 1 };
    let crashes = CrashStates::new(base.clone(), recorded.take_events(), options);
    let is_cut = |bytes: &Vec<u8>| bytes[1024 + 0x63] & 0x80 != 0;
    let cut = crashes.map(|crash| crash.disk.to_bytes()).find(is_cut).unwrap();
    let head = u32::from_le_bytes(cut[1024 + 0x188..1024 + 0x18C].try_into().unwrap());
    let head = head as usize * 1024;
    let mut random = Random::new(3);
    for seed in 0..scaled_rounds(100) {
        let mut image = cut.clone();
        for range in [1024..1024 + 0x400, head..head + 64, 1024 + 0x180..1024 + 0x190] {
            if random.next_below(2) == 0 {
                corrupt_field(&mut image, range, &mut random);
            }
        }
        run_offline_changes_with_timeout(&format!("log, {seed}"), &image);
    }
}
