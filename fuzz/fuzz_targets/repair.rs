//! Any bytes as a volume that is repaired: a repair that is complete leaves a silent check, and
//! nothing for a second one.
#![no_main]

use std::sync::Arc;

use draconis_device::{Disk, MemoryDisk};
use draconis_ext::Time;
use draconis_ext::check::{CheckOptions, check};
use draconis_ext::repair::{RepairOptions, plan};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(bytes.to_vec(), 512));
    let options = RepairOptions {
        superblock: Default::default(),
        check: CheckOptions { threads: 1, ..CheckOptions::default() },
        now: Time { seconds: 1_800_000_000, nanoseconds: 0 },
        max_change_bytes: 16 << 20,
    };
    let Ok(repair) = plan(&disk, &options, &|_, _| {}) else { return };
    if !repair.unfixed.is_empty() || repair.write(&disk, None, None).is_err() {
        return;
    }
    let report = check(&disk, options.check, &|_, _| {}).expect("a repaired volume is checked");
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    let again = plan(&disk, &options, &|_, _| {}).expect("a repaired volume is planned");
    assert!(again.is_empty(), "{:?}", again.fixes);
});
