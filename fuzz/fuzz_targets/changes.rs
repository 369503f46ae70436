//! Any bytes as a volume that is changed: the first few say how, the rest are the disk.
#![no_main]

use std::sync::Arc;

use draconis_device::MemoryDisk;
use draconis_ext::OpenOptions;
use libfuzzer_sys::fuzz_target;

#[path = "../../crates/ext/tests/common/storm.rs"]
mod storm;

/// Bytes that choose what is done.
const CHOICES: usize = 256;
/// Changes of one run.
const STEPS: usize = 40;

fuzz_target!(|bytes: &[u8]| {
    let Some((choices, disk)) = bytes.split_at_checked(CHOICES) else { return };
    let disk = Arc::new(MemoryDisk::new(disk.to_vec(), 512));
    let small = OpenOptions {
        inode_cache: 32,
        block_map_cache: 8,
        data_cache_bytes: 256 << 10,
        ..OpenOptions::default()
    };
    let Ok(mut storm) = storm::Storm::new(disk, small) else { return };
    // Choices are taken round and round; each goes into what is chosen after it.
    let mut state = 0u64;
    let mut round = choices.iter().cycle();
    let mut choose = |limit: u64| {
        let byte = round.next().copied().unwrap_or(0);
        state = state.wrapping_mul(0x100_0000_01B3) ^ u64::from(byte);
        if limit <= 256 { u64::from(byte) % limit.max(1) } else { state % limit }
    };
    for _ in 0..STEPS {
        storm.random_change(&mut choose);
    }
    storm.finish();
});
