//! Power loss at any moment of an offline change: the volume is unchanged, complete, or refused by
//! a feature and finished later.

use std::path::Path;
use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};
use draconis_ext::{InodeNumber, OpenOptions, Volume};
use draconis_testkit::{CrashOptions, CrashStates, Event, RecordDisk};

use super::compare::{self, ReferenceTree};
use super::{Image, run_tool};

/// Number of states checked.
#[derive(Debug, Default)]
pub struct CrashStateCounts {
    pub before: usize,
    pub finished: usize,
    pub after: usize,
}

/// Applies `change` to the volume in `bytes`, with the contents of `source`, and checks the states
/// after a power loss at any moment. `DRACONIS_CUTS=1` checks all.
pub fn check_crash_states(
    bytes: &[u8],
    source: &Path,
    change: impl FnOnce(&Arc<dyn Disk>),
) -> CrashStateCounts {
    let every = std::env::var("DRACONIS_CUTS").ok().and_then(|text| text.parse::<usize>().ok());
    let every = every.unwrap_or(64).max(1);
    let disk = Arc::new(RecordDisk::new(MemoryDisk::new(bytes.to_vec(), 512)));
    change(&(disk.clone() as Arc<dyn Disk>));
    let old_blocks = superblock_blocks_count_bytes(bytes);
    let events: Vec<Event> = disk.take_events();
    let options = CrashOptions { seed: 7, subsets: 3, exhaustive_sectors: 2 };
    let mut states = CrashStateCounts::default();
    let mut seen = [0; 3];
    for (nth, crash) in CrashStates::new(bytes.to_vec(), events, options).enumerate() {
        let what = format!("{:?} {nth}", crash.kind);
        let left = crash.disk.to_bytes();
        let is_unfinished = left[1024 + 0x63] & 0x80 != 0;
        let is_before = !is_unfinished && superblock_blocks_count_bytes(&left) == old_blocks;
        // Most states look the same: written blocks are unreferenced.
        let turn = &mut seen[usize::from(is_unfinished) + 2 * usize::from(is_before)];
        *turn += 1;
        let every = if is_before { every } else { every.div_ceil(16) };
        if *turn % every != 1 % every {
            continue;
        }
        let left = if is_unfinished {
            states.finished += 1;
            let disk = Arc::new(MemoryDisk::new(left.clone(), 512)) as Arc<dyn Disk>;
            let refused = Volume::open(disk, OpenOptions::default()).unwrap_err();
            assert!(refused.to_string().contains("unfinished"), "{what}: {refused}");
            let image = Image::from_bytes(&left);
            assert!(run_program_quietly("e2fsck", &["-p", image.path()]) >= 8, "{what}");
            let disk = MemoryDisk::new(std::fs::read(&image.path).unwrap(), 512);
            assert!(draconis_ext::finish_interrupted_change(&disk).unwrap(), "{what}");
            disk.into_bytes()
        } else {
            match is_before {
                true => states.before += 1,
                false => states.after += 1,
            }
            left
        };
        let image = Image::from_bytes(&left);
        assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some(), "{what}");
        compare::compare_trees(&image.open(), InodeNumber::ROOT, source, ReferenceTree::Source);
    }
    states
}

fn superblock_blocks_count_bytes(bytes: &[u8]) -> [u8; 4] {
    bytes[1024 + 4..1024 + 8].try_into().unwrap()
}

fn run_program_quietly(program: &str, arguments: &[&str]) -> i32 {
    let output = std::process::Command::new(program).args(arguments).output();
    output.ok().and_then(|output| output.status.code()).unwrap_or(i32::MAX)
}
