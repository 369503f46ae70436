//! Any writes into new disk images, and into them again once they are there: what is read of them is
//! what a disk in memory has.
#![no_main]

use std::sync::Arc;

use draconis_container::create::{DryRunDisk, NewFormat, NewImageDisk};
use draconis_container::{open, open_for_writing};
use draconis_device::{Disk, Extent, Group, MemoryDisk, Write};
use draconis_types::Block;
use libfuzzer_sys::fuzz_target;

/// What a write needs: its place, how many sectors, and what fills it.
const BYTES: usize = 4;
const LEN: u64 = 16 << 20;

fn write(disk: &dyn Disk, bytes: &[u8]) {
    let &[high, low, count, with] = bytes else { return };
    let at_bytes = (u64::from(high) << 8 | u64::from(low)) * 512 % (LEN - 256 * 512);
    let len = (usize::from(count) + 1) * 512;
    let mut block = Block::private(len);
    block.copy_in(0, &vec![with; len]);
    let ticket = disk.submit(Group { writes: vec![Write { at_bytes, block }] }, &[]);
    disk.wait_durable(ticket.expect("it is taken")).expect("it is durable");
}

fn bytes(disk: &dyn Disk) -> Vec<u8> {
    let read = disk.read_now(Extent::new(0, LEN), Block::private(LEN as usize));
    read.expect("it is read").into_private().to_vec()
}

fuzz_target!(|input: &[u8]| {
    let Some((kind, writes)) = input.split_first() else { return };
    let format = if kind & 1 == 0 { NewFormat::Qcow2 } else { NewFormat::Vhdx };
    let (drafted, later) = writes.split_at(writes.len() / 2);
    let model = MemoryDisk::new(vec![0; LEN as usize], 512);
    // Room for what is written once the image is there.
    let room = format.max_file_bytes(LEN) as usize + (1 << 20);
    let file = Arc::new(MemoryDisk::new(vec![0; room], 512));
    let draft = DryRunDisk::new(&*file, format, LEN);
    drafted.chunks_exact(BYTES).for_each(|it| write(&draft, it));
    let image = NewImageDisk::new(&*file, &draft, [7; 16]).expect("there is room");
    for it in drafted.chunks_exact(BYTES) {
        write(&image, it);
        write(&model, it);
    }
    image.finish().expect("it is made");
    drop(image);
    let found = bytes(&*open(file.clone(), &[]).expect("it is an image").disk);
    assert!(found == bytes(&model));
    // A VHDX image becomes longer for a new block, which memory cannot.
    if format == NewFormat::Qcow2 {
        let opened = open_for_writing(file.clone(), &[], 1).expect("it can be changed");
        for it in later.chunks_exact(BYTES) {
            write(&*opened.disk, it);
            write(&model, it);
        }
        drop(opened);
        let found = bytes(&*open(file, &[]).expect("it is an image").disk);
        assert!(found == bytes(&model));
    }
});
