//! Power loss during storms of changes: `e2fsck -p` repairs the result without a question.

mod common;

use std::process::Command;
use std::sync::Arc;

use common::Image;
use common::spoil::{base_images, scaled_rounds};
use common::storm::Storm;
use draconis_device::{MemoryDisk, Random};
use draconis_ext::OpenOptions;
use draconis_testkit::{CrashOptions, CrashStates, RecordDisk};

const STORM_STEPS: u64 = 14;
/// One state of so many is checked with `e2fsck`.
const E2FSCK_SAMPLE_INTERVAL: u64 = 4;

#[test]
fn storms_with_power_loss_are_repaired_by_e2fsck() {
    for seed in 0..scaled_rounds(40) {
        let Some(base) = base_images().get(seed as usize % base_images().len().max(1)) else {
            return;
        };
        let mut random = Random::new(seed ^ 0xC07C07);
        let disk = Arc::new(RecordDisk::new(MemoryDisk::new(base.clone(), 512)));
        let mut storm = Storm::new(disk.clone(), OpenOptions::default()).unwrap();
        storm.calm = true;
        for _ in 0..STORM_STEPS {
            storm.random_change(&mut |limit| random.next_below(limit));
        }
        storm.finish();
        let options = CrashOptions { seed, subsets: 4, exhaustive_sectors: 0 };
        for crash in CrashStates::new(base.clone(), disk.take_events(), options) {
            if random.next_below(E2FSCK_SAMPLE_INTERVAL) == 0 {
                let image = Image::from_bytes(&crash.disk.to_bytes());
                let checked = Command::new("e2fsck").args(["-fp", image.path()]).output().unwrap();
                let said = String::from_utf8_lossy(&checked.stdout);
                let mended = matches!(checked.status.code(), Some(0 | 1));
                assert!(mended, "seed {seed}, {:?}: {said}", crash.kind);
            }
        }
    }
}
