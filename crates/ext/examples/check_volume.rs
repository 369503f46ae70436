//! Damages a volume in memory and checks it, as `e2fsck -fn` would.
//!
//! `cargo run -p draconis-ext --example check_volume`

use std::sync::Arc;

use draconis_device::{Disk, Extent, Group, MemoryDisk, Write};
use draconis_ext::FileSystem;
use draconis_ext::check::{CheckOptions, Report, check};
use draconis_ext::mkfs::FormatOptions;
use draconis_types::Block;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new(vec![0; 8 << 20], 512));
    let options = FormatOptions { block_bytes: Some(4096), ..FormatOptions::default() };
    let fs = FileSystem::create_on(disk.clone(), &options, true)?;
    fs.write("/letter", "Dear reader,\n")?;
    fs.close()?;
    assert!(check_disk(&disk)?.is_clean());

    // The address of the block bitmap: bytes 0 to 3 of the group descriptor in block 1.
    let mut block = disk.read_now(Extent::new(4096, 512), Block::private(512))?;
    block.copy_in(0, &[0xff; 4]);
    let writes = vec![Write { at_bytes: 4096, block }];
    disk.wait_durable(disk.submit(Group { writes }, &[])?)?;

    let report = check_disk(&disk)?;
    assert!(!report.is_clean());
    for problem in &report.problems {
        println!("{problem}");
    }
    Ok(())
}

fn check_disk(disk: &Arc<dyn Disk>) -> draconis_ext::Result<Report> {
    check(disk, CheckOptions::default(), &|_done, _total| {})
}
