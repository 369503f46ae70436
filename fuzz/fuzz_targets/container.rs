//! Any bytes as a disk image that is read, over itself too, and changed, and as something compressed.
#![no_main]

use std::io::Read;
use std::sync::Arc;

use draconis_container::{compression::Compression, list_partitions, open, open_for_writing};
use draconis_device::{Disk, Extent, Group, MemoryDisk, Write};
use draconis_types::Block;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(Ok(stream)) = Compression::detect(bytes).map(|packing| packing.decompress(bytes)) {
        let _ = std::io::copy(&mut stream.take(1 << 24), &mut std::io::sink());
    }
    let mut padded = bytes.to_vec();
    padded.resize(bytes.len().next_multiple_of(512), 0);
    if let Ok(opened) = open_for_writing(Arc::new(MemoryDisk::new(padded.clone(), 512)), &[], 7) {
        let sectors = opened.disk.properties().len_bytes / 512;
        for nth in [0, 1, sectors / 2, sectors.saturating_sub(1)] {
            let block = Block::private(512);
            let group = Group { writes: vec![Write { at_bytes: nth * 512, block }] };
            // What fails stops; what was taken is there.
            let Ok(ticket) = opened.disk.submit(group, &[]) else { break };
            let _ = opened.disk.wait_durable(ticket);
        }
        let _ = opened.session.map(|image| image.close_session());
    }
    let image: Arc<dyn Disk> = Arc::new(MemoryDisk::new(padded, 512));
    let behind = [image.clone(), image.clone()];
    let Ok(opened) = open(image.clone(), &[]).or_else(|_| open(image, &behind)) else { return };
    let _ = list_partitions(&*opened.disk);
    let sectors = opened.disk.properties().len_bytes / 512;
    for nth in (0..sectors.min(256)).chain(sectors.saturating_sub(4)..sectors) {
        let _ = opened.disk.read_now(Extent::new(nth * 512, 512), Block::private(512));
    }
});
