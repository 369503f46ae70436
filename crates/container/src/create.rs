//! Creates complete disk images. A dry run records the units written; then units, tables and last
//! the header are written.
//!
//! ```text
//!   file   | header | units of the disk, in order .. | tables |
//! ```
//! Law 1: until [`NewImageDisk::finish`] has returned the file is no image: its head is zeros.
//! Law 2: the file initially reads as zeros, and unwritten units take no space in it.
//! Law 3: unit offsets depend only on the set of recorded units, not on the order of writes: equal
//! disks make equal files.
//! Law 4: a ticket has the same state (accepted, visible, durable) for the disk as for the file.

mod qcow2;
mod vhdx;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_device::{
    ChainBounds, Disk, Error as DiskError, Extent, Group, Pending, Properties, ReadAnswer, Refused,
    Ticket, Urgency, Write,
};
use draconis_types::Block;
use draconis_types::lock::Mutex;

/// A write to the file: offset and contents.
type FileWrite = (u64, Vec<u8>);

/// Format of a new image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NewFormat {
    /// qcow2 of version 3, by QEMU.
    Qcow2,
    /// Dynamic VHDX, by Hyper-V.
    Vhdx,
}

impl NewFormat {
    const fn allocation_unit_bytes(self) -> u64 {
        match self {
            Self::Qcow2 => qcow2::CLUSTER_BYTES,
            Self::Vhdx => vhdx::BLOCK_BYTES,
        }
    }

    const fn first_unit_offset(self) -> u64 {
        match self {
            Self::Qcow2 => qcow2::CLUSTER_BYTES,
            Self::Vhdx => vhdx::FIRST_BLOCK_OFFSET,
        }
    }

    /// Returns the maximum size of a file with a disk of `len_bytes`.
    pub const fn max_file_bytes(self, len_bytes: u64) -> u64 {
        let unit = self.allocation_unit_bytes();
        let units = len_bytes.div_ceil(unit);
        // Tables have eight bytes for each unit, and two, each rounded up.
        let tables = units.saturating_mul(16).div_ceil(unit).saturating_add(16);
        units.saturating_add(tables).saturating_mul(unit).saturating_add(self.first_unit_offset())
    }

    /// Returns the maximum length of a disk.
    pub const fn max_disk_bytes(self) -> u64 {
        match self {
            Self::Qcow2 => qcow2::MAX_DISK_BYTES,
            Self::Vhdx => vhdx::MAX_DISK_BYTES,
        }
    }
}

/// Offsets of the disk's units in the file.
struct UnitOffsets {
    /// Offset by unit number, for units with contents.
    units: BTreeMap<u64, u64>,
    /// End of the last unit.
    end: u64,
}

/// A disk that records only which units are written.
pub struct DryRunDisk {
    format: NewFormat,
    properties: Properties,
    units: Mutex<BTreeSet<u64>>,
    tickets: AtomicU64,
}

impl DryRunDisk {
    /// Creates a dry run for an image, in `file`, of a disk of `len_bytes`.
    pub fn new(file: &dyn Disk, format: NewFormat, len_bytes: u64) -> Self {
        let properties = Properties { len_bytes, ..file.properties() };
        Self { format, properties, units: Mutex::default(), tickets: AtomicU64::new(0) }
    }
}

impl Disk for DryRunDisk {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn read(&self, at: Extent, into: Block, _: Urgency) -> Pending<ReadAnswer> {
        let error = DiskError::ShortRead { extent: at, got_bytes: 0 };
        Pending::ready(Err(Refused { payload: Some(into), error }))
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        _: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        if let Err(error) = self.properties.check_chain(&chain) {
            return Err(Refused { payload: Some(chain), error });
        }
        let unit = self.format.allocation_unit_bytes();
        let mut units = self.units.lock();
        for write in chain.iter().flat_map(|group| &group.writes) {
            let end = write.at_bytes + write.block.len() as u64;
            units.extend(write.at_bytes / unit..end.div_ceil(unit));
        }
        drop(units);
        let count = chain.len() as u64;
        let given = self.tickets.fetch_add(count, Ordering::Relaxed);
        Ok((given + 1..=given + count).map(Ticket).collect())
    }

    fn wait_visible(&self, _: Ticket) -> Result<(), DiskError> {
        Ok(())
    }

    fn wait_durable(&self, _: Ticket) -> Result<(), DiskError> {
        Ok(())
    }
}

/// A disk in an image that is being created.
pub struct NewImageDisk<'a> {
    file: &'a dyn Disk,
    format: NewFormat,
    len_bytes: u64,
    identity: [u8; 16],
    places: Mutex<UnitOffsets>,
}

impl<'a> NewImageDisk<'a> {
    /// Creates an image of the disk of `draft` in `file`, which reads as zeros and has at least
    /// [`NewFormat::max_file_bytes`]. Identifiers in the image derive from `identity`.
    pub fn new(
        file: &'a dyn Disk,
        draft: &DryRunDisk,
        identity: [u8; 16],
    ) -> Result<Self, DiskError> {
        let (format, len_bytes) = (draft.format, draft.properties.len_bytes);
        let extent = Extent::new(0, format.max_file_bytes(len_bytes));
        if extent.len_bytes > file.properties().len_bytes || len_bytes > format.max_disk_bytes() {
            return Err(DiskError::ShortRead { extent, got_bytes: 0 });
        }
        let drafted = draft.units.lock();
        let places =
            (format.first_unit_offset()..).step_by(format.allocation_unit_bytes() as usize);
        let units: BTreeMap<u64, u64> = drafted.iter().copied().zip(places).collect();
        let end = format.first_unit_offset() + units.len() as u64 * format.allocation_unit_bytes();
        let places = Mutex::new(UnitOffsets { units, end });
        Ok(Self { file, format, len_bytes, identity, places })
    }

    /// Writes the tables and, once they are durable, the header; returns the bytes that the file
    /// needs.
    ///
    /// # Errors
    /// Error of the file's disk.
    pub fn finish(&self) -> Result<u64, DiskError> {
        let places = self.places.lock();
        let (tables, head, end) = match self.format {
            NewFormat::Qcow2 => qcow2::build_tables(&places, self.len_bytes),
            NewFormat::Vhdx => vhdx::build_tables(&places, self.len_bytes, self.identity),
        };
        for pieces in [tables, head] {
            let mut last = None;
            for (at_bytes, bytes) in pieces {
                let mut block = Block::private(bytes.len());
                block.copy_in(0, &bytes);
                let group = Group { writes: vec![Write { at_bytes, block }] };
                let ticket = self.file.submit(group, &[]).map_err(|refused| refused.error)?;
                last = Some(ticket);
            }
            if let Some(ticket) = last {
                self.file.wait_durable(ticket)?;
            }
        }
        Ok(end)
    }

    /// Translates a write to the offsets of its units in the file.
    fn translate_write(&self, places: &mut UnitOffsets, write: Write) -> Vec<Write> {
        let unit = self.format.allocation_unit_bytes();
        let Write { at_bytes, block } = write;
        let len = block.len() as u64;
        let mut parts: Vec<(u64, u64, u64)> = vec![];
        let mut done = 0;
        while done < len {
            let at = at_bytes + done;
            let here = (unit - at % unit).min(len - done);
            let UnitOffsets { units, end } = &mut *places;
            let place = units.entry(at / unit).or_insert_with(|| {
                *end += unit;
                *end - unit
            });
            let to = *place + at % unit;
            match parts.last_mut() {
                Some((start, _, count)) if *start + *count == to => *count += here,
                _ => parts.push((to, done, here)),
            }
            done += here;
        }
        if let [(to, _, _)] = parts[..] {
            return vec![Write { at_bytes: to, block }];
        }
        let part = |(to, from, count): (u64, u64, u64)| {
            let mut bytes = vec![0; count as usize];
            block.copy_out(from as usize, &mut bytes);
            let mut piece = Block::private(bytes.len());
            piece.copy_in(0, &bytes);
            Write { at_bytes: to, block: piece }
        };
        parts.into_iter().map(part).collect()
    }
}

impl Disk for NewImageDisk<'_> {
    fn properties(&self) -> Properties {
        Properties { len_bytes: self.len_bytes, ..self.file.properties() }
    }

    fn chain_bounds(&self) -> ChainBounds {
        self.file.chain_bounds()
    }

    /// Reads ranges that were written with one write, or never.
    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        let unit = self.format.allocation_unit_bytes();
        let places = self.places.lock();
        let is_in_one = at.start_bytes % unit + at.len_bytes <= unit;
        match places.units.get(&(at.start_bytes / unit)) {
            Some(place) if is_in_one => {
                let start = *place + at.start_bytes % unit;
                self.file.read(Extent::new(start, at.len_bytes), into, urgency)
            }
            _ => {
                let error = DiskError::ShortRead { extent: at, got_bytes: 0 };
                Pending::ready(Err(Refused { payload: Some(into), error }))
            }
        }
    }

    fn submit_chain(
        &self,
        chain: Vec<Group>,
        after: &[Ticket],
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        if let Err(error) = self.properties().check_chain(&chain) {
            return Err(Refused { payload: Some(chain), error });
        }
        let mut places = self.places.lock();
        let place = |group: Group| Group {
            writes: group
                .writes
                .into_iter()
                .flat_map(|it| self.translate_write(&mut places, it))
                .collect(),
        };
        let chain = chain.into_iter().map(place).collect();
        drop(places);
        self.file.submit_chain(chain, after)
    }

    fn wait_visible(&self, ticket: Ticket) -> Result<(), DiskError> {
        self.file.wait_visible(ticket)
    }

    fn wait_durable(&self, ticket: Ticket) -> Result<(), DiskError> {
        self.file.wait_durable(ticket)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use draconis_device::MemoryDisk;

    use super::*;

    const DISK_BYTES: u64 = 40 << 20;
    /// Offset and length of the test's writes: parts of units, and several at once.
    const SAMPLE_WRITES: [(u64, usize); 5] = [
        (DISK_BYTES - 4096, 4096),
        (1024, 512),
        (3 << 20, 300 << 10),
        (9 << 20, 2 << 20),
        (0, 1024),
    ];

    fn write_samples(disk: &dyn Disk) {
        for (nth, (at_bytes, len)) in SAMPLE_WRITES.into_iter().enumerate() {
            let mut block = Block::private(len);
            block.copy_in(0, &vec![nth as u8 + 1; len]);
            let group = Group { writes: vec![Write { at_bytes, block }] };
            let ticket = disk.submit(group, &[]).unwrap();
            disk.wait_durable(ticket).unwrap();
        }
    }

    fn read_bytes(disk: &dyn Disk, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let block = disk.read_now(Extent::new(at, len as u64), Block::private(len)).unwrap();
        block.copy_out(0, &mut bytes);
        bytes
    }

    #[test]
    fn written_data_is_read_and_header_comes_last() {
        for format in [NewFormat::Qcow2, NewFormat::Vhdx] {
            let file =
                Arc::new(MemoryDisk::new(vec![0; format.max_file_bytes(DISK_BYTES) as usize], 512));
            let draft = DryRunDisk::new(&*file, format, DISK_BYTES);
            write_samples(&draft);
            let image = NewImageDisk::new(&*file, &draft, [7; 16]).unwrap();
            write_samples(&image);
            assert_eq!(crate::open(file.clone(), &[]).unwrap().format, None);
            let end = image.finish().unwrap();
            assert!(end <= format.max_file_bytes(DISK_BYTES) && end < 20 << 20, "{end}");
            drop(image);
            let opened = crate::open(file, &[]).unwrap();
            assert!(opened.format.is_some());
            assert_eq!(opened.disk.properties().len_bytes, DISK_BYTES);
            let mut expected = vec![0; DISK_BYTES as usize];
            for (nth, (at, len)) in SAMPLE_WRITES.into_iter().enumerate() {
                expected[at as usize..at as usize + len].fill(nth as u8 + 1);
            }
            for at in (0..DISK_BYTES).step_by(1 << 20) {
                let found = read_bytes(&*opened.disk, at, 1 << 20);
                assert!(found == expected[at as usize..at as usize + (1 << 20)], "{format:?} {at}");
            }
        }
    }

    #[test]
    fn oversized_disk_is_refused() {
        let file = MemoryDisk::new(vec![0; 1 << 20], 512);
        for format in [NewFormat::Qcow2, NewFormat::Vhdx] {
            let draft = DryRunDisk::new(&file, format, DISK_BYTES);
            assert!(NewImageDisk::new(&file, &draft, [0; 16]).is_err());
        }
    }
}
