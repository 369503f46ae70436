//! Differencing images, built by hand: no available program writes them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use draconis_device::{Disk, Extent, FileOptions, OpenedFile, Random};
use draconis_exchange::heap::Block;

use super::log::{SECTOR as LOG_SECTOR, new_entry};
use super::{
    DATA_WRITE, HAS_PARENT, HEADER_BYTES, HEADERS, KIB, LOG, MIB, PARENT_LOCATOR, SB_BLOCK_PRESENT,
    locator, set_checksum,
};
use crate::create::{DryRunDisk, NewFormat, NewImage};
use crate::image_file::le64;
use crate::{Error, Unsupported, open, open_for_writing};

const SECTOR: u64 = 512;
/// Offset of the BAT of a new image.
const TABLE_AT: u64 = 3 * MIB;
const METADATA_AT: u64 = 2 * MIB;
const BLOCKS_AT: u64 = 8 * MIB;
/// The largest blocks have the fewest per chunk: a disk of some GiB has two bitmaps.
const BLOCK_BYTES: u64 = 256 * MIB;
const CHUNK: u64 = 16;

fn disk(file: &File, write: bool) -> Arc<dyn Disk> {
    let how = FileOptions { write, direct: false, uring: false };
    Arc::new(OpenedFile::new(file.try_clone().unwrap().into(), how).unwrap().start())
}

fn texts(pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut item = locator::KIND.to_vec();
    item.extend([0, 0]);
    item.extend((pairs.len() as u16).to_le_bytes());
    let mut at = 20 + 12 * pairs.len();
    let mut all = vec![];
    let utf16 =
        |text: &str| -> Vec<u8> { text.encode_utf16().flat_map(u16::to_le_bytes).collect() };
    for pair in pairs {
        let (key, value) = (utf16(pair.0), utf16(pair.1));
        item.extend((at as u32).to_le_bytes());
        item.extend(((at + key.len()) as u32).to_le_bytes());
        item.extend((key.len() as u16).to_le_bytes());
        item.extend((value.len() as u16).to_le_bytes());
        at += key.len() + value.len();
        all.extend([key, value].concat());
    }
    [item, all].concat()
}

/// Returns an image without blocks of its own, over the one with the data GUID `behind`.
fn image(len_bytes: u64, identity: u8, behind: Option<&[u8]>) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(NewFormat::Vhdx.max_file_bytes(len_bytes)).unwrap();
    let on = disk(&file, true);
    let draft = DryRunDisk::new(&*on, NewFormat::Vhdx, len_bytes);
    NewImage::new(&*on, &draft, [identity; 16]).unwrap().finish().unwrap();
    file.set_len(BLOCKS_AT).unwrap();
    let flags = if behind.is_some() { HAS_PARENT } else { 0 };
    let parameters = [BLOCK_BYTES as u32, flags].map(u32::to_le_bytes).concat();
    file.write_all_at(&parameters, METADATA_AT + 64 * KIB).unwrap();
    if let Some(locator) = behind {
        let at = 128 * KIB as u32;
        let entry = [&PARENT_LOCATOR[..], &at.to_le_bytes(), &(locator.len() as u32).to_le_bytes()];
        file.write_all_at(&entry.concat(), METADATA_AT + 32 + 32 * 5).unwrap();
        file.write_all_at(&6u16.to_le_bytes(), METADATA_AT + 10).unwrap();
        file.write_all_at(locator, METADATA_AT + u64::from(at)).unwrap();
    }
    file
}

fn over(len_bytes: u64, identity: u8, behind: u8) -> File {
    let behind = locator::shown(&[behind; 16]).to_ascii_uppercase();
    let pairs = [("relative_path", r".\parent.vhdx"), ("parent_linkage", &behind)];
    image(len_bytes, identity, Some(&texts(&pairs)))
}

/// Sets the BAT entry of a block, or of the bitmap of a chunk, which follows those of its blocks.
fn set(file: &File, nth: u64, entry: u64) {
    file.write_all_at(&entry.to_le_bytes(), TABLE_AT + 8 * nth).unwrap();
}

/// Returns the offset of the block `nth`, if it is present.
fn place(nth: u64) -> u64 {
    BLOCKS_AT + nth * BLOCK_BYTES
}

/// States of a layer's blocks and, for partially present ones, which of the tested sectors are its
/// own.
struct Layer {
    len_bytes: u64,
    blocks: Vec<(u64, Vec<u64>)>,
    byte: u8,
}

/// Returns the tested sectors of a block: its ends, and those around pages of the bitmap.
fn looked_at() -> Vec<u64> {
    let last = BLOCK_BYTES / SECTOR - 1;
    vec![0, 1, 2, 4094, 4095, 4096, 4097, 8191, 8192, 300_000, last - 1, last]
}

impl Layer {
    fn random(random: &mut Random, len_bytes: u64, byte: u8) -> Self {
        let blocks = (0..len_bytes.div_ceil(BLOCK_BYTES)).map(|_| {
            let state = [0, 2, 3, 6, 7, 7][random.below(6) as usize];
            (state, looked_at().into_iter().filter(|_| random.once_in(2)).collect())
        });
        Self { len_bytes, blocks: blocks.collect(), byte }
    }

    fn write(&self, file: &File) {
        let chunks = (self.blocks.len() as u64).div_ceil(CHUNK);
        let bitmap = |chunk: u64| place(self.blocks.len() as u64) + chunk * MIB;
        file.set_len(bitmap(chunks)).unwrap();
        let mut bits = vec![vec![0u8; MIB as usize]; chunks as usize];
        for (nth, (state, own)) in (0..).zip(&self.blocks) {
            set(file, nth + nth / CHUNK, if *state == 0 { 0 } else { place(nth) | state });
            for sector in own {
                let bit = nth % CHUNK * (BLOCK_BYTES / SECTOR) + sector;
                bits[(nth / CHUNK) as usize][bit as usize / 8] |= 1 << (bit % 8);
            }
            // Sectors that are not its own have contents too, which must not be read.
            for sector in looked_at() {
                file.write_all_at(&[self.byte; 512], place(nth) + sector * SECTOR).unwrap();
            }
        }
        for (chunk, bits) in (0..).zip(bits) {
            set(file, chunk * (CHUNK + 1) + CHUNK, bitmap(chunk) | SB_BLOCK_PRESENT);
            file.write_all_at(&bits, bitmap(chunk)).unwrap();
        }
    }

    /// Returns the contents of a sector over one that holds `below`.
    fn sector(&self, nth: u64, below: u8) -> u8 {
        let per_block = BLOCK_BYTES / SECTOR;
        match self.blocks.get((nth / per_block) as usize) {
            Some((0, _)) => below,
            Some((6, _)) => self.byte,
            Some((7, own)) if own.contains(&(nth % per_block)) => self.byte,
            Some((7, _)) => below,
            _ => 0,
        }
    }
}

fn read(disk: &dyn Disk, sector: u64, count: u64) -> Vec<u8> {
    let at = Extent::new(sector * SECTOR, count * SECTOR);
    let block = disk.read_now(at, Block::private(at.len_bytes as usize));
    block.unwrap_or_else(|refused| panic!("{sector}: {}", refused.error)).into_private().to_vec()
}

#[test]
fn images_are_read_over_others() {
    let gib = 1 << 30;
    let mut random = Random::new(17);
    for _ in 0..3 {
        // The top one is longer than those below.
        let base = Layer::random(&mut random, 4 * gib, 1);
        let base = Layer { blocks: base.blocks.into_iter().map(|_| (6, vec![])).collect(), ..base };
        let middle = Layer::random(&mut random, 5 * gib, 2);
        let top = Layer::random(&mut random, 5 * gib + 6 * SECTOR, 3);
        let files = [
            image(base.len_bytes, 21, None),
            over(middle.len_bytes, 22, 21),
            over(top.len_bytes, 23, 22),
        ];
        for (layer, file) in [&base, &middle, &top].into_iter().zip(&files) {
            layer.write(file);
        }
        let [base_disk, middle_disk, top_disk] = files.each_ref().map(|file| disk(file, false));
        let behind = [middle_disk, base_disk.clone()];
        let opened = open(top_disk.clone(), &behind).unwrap().disk;
        assert_eq!(opened.properties().len_bytes, top.len_bytes);
        let last = top.len_bytes / SECTOR;
        let firsts = (0..top.blocks.len() as u64).map(|nth| nth * (BLOCK_BYTES / SECTOR));
        for sector in firsts.flat_map(|first| looked_at().into_iter().map(move |nth| first + nth)) {
            if sector >= last {
                continue;
            }
            let of_base = if sector < base.len_bytes / SECTOR { base.sector(sector, 0) } else { 0 };
            let of_middle = match sector < middle.len_bytes / SECTOR {
                true => middle.sector(sector, of_base),
                false => 0,
            };
            let expected = top.sector(sector, of_middle);
            assert_eq!(read(&*opened, sector, 1), [expected; 512], "{sector}");
            // Together with its neighbour, which may come from another layer.
            if sector % 4096 == 4095 || sector % 4096 == 0 {
                assert_eq!(read(&*opened, sector, 2)[..512], [expected; 512], "{sector}");
            }
        }
        // Writing is refused, and names are as the images have them.
        let refused = open_for_writing(disk(&files[2], true), &behind, 7).err().unwrap();
        assert!(refused.to_string().contains("is only read"), "{refused}");
        let missing = open(top_disk.clone(), &behind[..1]).err().unwrap();
        let name = r".\parent.vhdx".to_owned();
        assert_eq!(missing, Error::Unsupported(Unsupported::NeedsBacking(name.clone())));
        for wrong in [base_disk, top_disk.clone()] {
            let refused = open(top_disk.clone(), &[wrong, behind[1].clone()]).err().unwrap();
            let Error::Unsupported(Unsupported::WrongBacking { name: of, wanted, .. }) = &refused
            else {
                panic!("{refused}");
            };
            assert_eq!((of, wanted), (&name, &locator::shown(&[22; 16])));
        }
    }
}

#[test]
fn the_log_has_bitmaps_too() {
    let base = image(BLOCK_BYTES, 31, None);
    set(&base, 0, place(0) | 6);
    base.set_len(place(1)).unwrap();
    base.write_all_at(&[1; 1024], place(0)).unwrap();
    let child = over(BLOCK_BYTES, 32, 31);
    set(&child, 0, place(0) | 7);
    set(&child, CHUNK, place(1) | SB_BLOCK_PRESENT);
    child.set_len(place(1) + MIB).unwrap();
    child.write_all_at(&[2; 1024], place(0)).unwrap();
    let behind = [disk(&base, false)];
    let sector = |nth| {
        let opened = open(disk(&child, false), &behind).unwrap().disk;
        read(&*opened, nth, 1)[0]
    };
    assert_eq!([sector(0), sector(1)], [1, 1]);
    // Not closed cleanly: only the log marks the second sector as its own.
    let id = [9; 16];
    let mut bits = vec![0; LOG_SECTOR];
    bits[0] = 2;
    let entry = new_entry(&id, 1, 0, place(1) + MIB, &[(place(1), bits)]);
    child.write_all_at(&entry, MIB).unwrap();
    for at in HEADERS {
        let mut header = vec![0; HEADER_BYTES];
        child.read_exact_at(&mut header, at).unwrap();
        header[LOG..LOG + 16].copy_from_slice(&id);
        set_checksum(&mut header);
        child.write_all_at(&header, at).unwrap();
    }
    assert_eq!([sector(0), sector(1)], [1, 2]);
}

#[test]
fn the_image_behind_may_be_the_one_that_is_merged() {
    let base = image(BLOCK_BYTES, 41, None);
    let [other, right] = [40, 41].map(|id| locator::shown(&[id; 16]));
    let pairs =
        [("parent_linkage", &other[..]), ("parent_linkage2", &right), ("volume_path", "parent")];
    let child = image(BLOCK_BYTES, 42, Some(&texts(&pairs)));
    open(disk(&child, false), &[disk(&base, false)]).unwrap();
    // Its contents were changed: they have another data GUID.
    let mut header = vec![0; HEADER_BYTES];
    base.read_exact_at(&mut header, HEADERS[1]).unwrap();
    let newer = le64(&header, 8) + 1;
    header[8..16].copy_from_slice(&newer.to_le_bytes());
    header[DATA_WRITE..DATA_WRITE + 16].fill(43);
    set_checksum(&mut header);
    base.write_all_at(&header, HEADERS[0]).unwrap();
    let refused = open(disk(&child, false), &[disk(&base, false)]).err().unwrap();
    assert!(matches!(refused, Error::Unsupported(Unsupported::WrongBacking { .. })), "{refused}");
}

#[test]
fn locators_and_bitmaps_that_lie_are_refused() {
    let right = locator::shown(&[51; 16]);
    let good = texts(&[("parent_linkage", &right)]);
    let bad: [Vec<u8>; 6] = [
        vec![],
        texts(&[]),
        texts(&[("relative_path", "parent")]),
        texts(&[("parent_linkage", "{}")]),
        texts(&[("parent_linkage", &right.replace('3', "\u{1b}"))]),
        good[..40].to_vec(),
    ];
    for (nth, locator) in bad.iter().enumerate() {
        let image = image(BLOCK_BYTES, 50, Some(locator));
        let refused = open(disk(&image, false), &[]).err().unwrap();
        assert!(refused.to_string().contains("VHDX"), "{nth}: {refused}");
    }
    // One with an impossible length, and one past the end.
    for (field, value) in [(20u64, u32::MAX), (16, 0xFFFF_FF00)] {
        let image = image(BLOCK_BYTES, 50, Some(&good));
        image.write_all_at(&value.to_le_bytes(), METADATA_AT + 32 + 32 * 5 + field).unwrap();
        assert!(open(disk(&image, false), &[]).is_err());
    }
    // A partially present block without its bitmap.
    let base = image(BLOCK_BYTES, 51, None);
    let child = image(BLOCK_BYTES, 50, Some(&good));
    set(&child, 0, place(0) | 7);
    let opened = open(disk(&child, false), &[disk(&base, false)]).unwrap().disk;
    assert!(opened.read_now(Extent::new(0, 512), Block::private(512)).is_err());
    // Without a parent no block is partially present.
    set(&base, 0, place(0) | 7);
    let opened = open(disk(&base, false), &[]).unwrap().disk;
    assert!(opened.read_now(Extent::new(0, 512), Block::private(512)).is_err());
}
