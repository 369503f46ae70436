//! A range of a disk as a disk: a partition, or an image after a header.

use std::sync::Arc;

use draconis_types::Block;

use crate::{
    AllocationRun, Disk, Error, Extent, Group, Pending, Properties, ReadAnswer, Refused,
    SubmitOptions, Ticket, Urgency,
};

/// The bytes of `extent` of another disk, from offset zero.
pub struct SubDisk {
    disk: Arc<dyn Disk>,
    extent: Extent,
}

impl SubDisk {
    /// Creates a disk of `extent` of `disk`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] or [`Error::Misaligned`] if it is not whole sectors within the disk.
    pub fn new(disk: Arc<dyn Disk>, extent: Extent) -> Result<Self, Error> {
        let len = usize::try_from(extent.len_bytes).unwrap_or(usize::MAX);
        disk.properties().check_range(extent, len)?;
        Ok(Self { disk, extent })
    }

    /// Creates a disk of `disk` from `start_bytes` to its end.
    ///
    /// # Errors
    /// As [`SubDisk::new`].
    pub fn from_offset(disk: Arc<dyn Disk>, start_bytes: u64) -> Result<Self, Error> {
        let len_bytes = disk.properties().len_bytes;
        match len_bytes.checked_sub(start_bytes) {
            Some(rest) => Self::new(disk, Extent::new(start_bytes, rest)),
            None => Err(Error::OutOfRange { extent: Extent::new(start_bytes, 0), len_bytes }),
        }
    }
}

impl crate::ForwardingDisk for SubDisk {
    type Inner = dyn Disk;

    fn inner_disk(&self) -> &Self::Inner {
        &*self.disk
    }

    fn properties(&self) -> Properties {
        Properties { len_bytes: self.extent.len_bytes, ..self.inner_disk().properties() }
    }

    fn read(&self, at: Extent, into: Block, urgency: Urgency) -> Pending<ReadAnswer> {
        if let Err(error) = Disk::properties(self).check_range(at, into.len()) {
            return Pending::ready(Err(Refused { payload: Some(into), error }));
        }
        // No overflow: the range is within this disk, so the sum is within the inner disk.
        let there = Extent::new(self.extent.start_bytes + at.start_bytes, at.len_bytes);
        self.inner_disk().read(there, into, urgency)
    }

    fn max_len_bytes(&self) -> u64 {
        self.extent.len_bytes
    }

    fn submit_with(
        &self,
        mut chain: Vec<Group>,
        after: &[Ticket],
        terms: SubmitOptions,
    ) -> Result<Vec<Ticket>, Refused<Vec<Group>>> {
        if let Err(error) = Disk::properties(self).check_chain(&chain) {
            return Err(Refused { payload: Some(chain), error });
        }
        for write in chain.iter_mut().flat_map(|group| &mut group.writes) {
            write.at_bytes += self.extent.start_bytes;
        }
        self.inner_disk().submit_with(chain, after, terms).map_err(|mut refused| {
            let groups = refused.payload.iter_mut().flatten();
            for write in groups.flat_map(|group| &mut group.writes) {
                write.at_bytes -= self.extent.start_bytes;
            }
            refused
        })
    }

    fn discard(&self, extents: &[Extent], after: &[Ticket]) -> Result<(), Error> {
        Disk::properties(self).check_extents(extents)?;
        let there =
            |at: &Extent| Extent::new(self.extent.start_bytes + at.start_bytes, at.len_bytes);
        self.inner_disk().discard(&extents.iter().map(there).collect::<Vec<_>>(), after)
    }

    fn punch_hole(&self, at: Extent) -> Result<Option<Ticket>, Error> {
        Disk::properties(self).check_extents(&[at])?;
        let there = Extent::new(self.extent.start_bytes + at.start_bytes, at.len_bytes);
        self.inner_disk().punch_hole(there)
    }

    fn allocation_run(&self, at: Extent) -> Result<AllocationRun, Error> {
        Disk::properties(self).check_extents(&[at])?;
        let there = Extent::new(self.extent.start_bytes + at.start_bytes, at.len_bytes);
        self.inner_disk().allocation_run(there)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryDisk, Write};

    fn disk() -> Arc<dyn Disk> {
        Arc::new(MemoryDisk::new((0..8192).map(|i| (i / 512) as u8).collect(), 512))
    }

    #[test]
    fn sub_disk_reads_only_its_extent() {
        let view = SubDisk::new(disk(), Extent::new(1024, 2048)).unwrap();
        let got = view.read_now(Extent::new(512, 512), Block::private(512)).unwrap();
        assert_eq!(got.bytes().unwrap()[0], 3);
        for (start, len) in [(2048, 512), (u64::MAX - 511, 512), (1536, 1024)] {
            let block = Block::private(len as usize);
            let refused = view.read_now(Extent::new(start, len), block).unwrap_err();
            assert!(matches!(refused.error, Error::OutOfRange { len_bytes: 2048, .. }));
        }
        assert!(SubDisk::new(disk(), Extent::new(8192, 512)).is_err());
        assert!(SubDisk::from_offset(disk(), 8193).is_err());
    }

    #[test]
    fn sub_disk_writes_only_its_extent() {
        let disk = disk();
        let view = SubDisk::from_offset(disk.clone(), 4096).unwrap();
        let group =
            |at_bytes| Group { writes: vec![Write { at_bytes, block: Block::private(512) }] };
        let ticket = view.submit(group(512), &[]).unwrap();
        view.wait_durable(ticket).unwrap();
        let got = disk.read_now(Extent::new(4096, 1536), Block::private(1536)).unwrap();
        let got = got.into_private();
        assert_eq!((got[0], got[512], got[1024]), (8, 0, 10));
        let refused = view.submit(group(4096), &[]).unwrap_err();
        assert_eq!(refused.payload.unwrap().writes[0].at_bytes, 4096);
    }

    #[test]
    fn sub_disk_discards_only_its_extent() {
        let disk = disk();
        let view = SubDisk::from_offset(disk.clone(), 4096).unwrap();
        view.discard(&[Extent::new(512, 512)], &[]).unwrap();
        let error = view.discard(&[Extent::new(3584, 1024)], &[]).unwrap_err();
        assert_eq!(error, Error::OutOfRange { extent: Extent::new(3584, 1024), len_bytes: 4096 });
        let got = disk.read_now(Extent::new(0, 8192), Block::private(8192)).unwrap();
        let got: Vec<u8> = got.into_private().chunks(512).map(|sector| sector[0]).collect();
        assert_eq!(got, [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 10, 11, 12, 13, 14, 15]);
    }
}
