//! Read-only disks over a source of bytes.

use draconis_device::{
    AllocationRun, Atomic, Disk, Error as DiskError, Extent, Pending, Properties, ReadAnswer,
    Refused, Urgency,
};
use draconis_types::Block;

use crate::Error;

/// Sector size of disks inside files.
pub(crate) const SECTOR_BYTES: u32 = 512;

/// Source of the bytes of a disk.
pub(crate) trait ReadSource: Send + Sync {
    /// Fills `into` from disk offset `at_bytes`; the range is inside the disk.
    fn read_exact_at(&self, at_bytes: u64, into: &mut [u8]) -> Result<(), Error>;

    /// Returns the state of the start of `at`, as [`Disk::allocation_run`] does.
    fn allocation_run(&self, at: Extent) -> Result<AllocationRun, Error> {
        Ok(AllocationRun::stored(at))
    }
}

/// A read-only disk of a source.
pub(crate) struct ReadOnlyDisk<F> {
    properties: Properties,
    from: F,
}

impl<F: ReadSource> ReadOnlyDisk<F> {
    /// Creates a disk of `len_bytes`, in whole sectors, with properties `like` those of its file.
    pub(crate) fn new(len_bytes: u64, like: Properties, from: F) -> Self {
        let properties = Properties {
            len_bytes: len_bytes - len_bytes % u64::from(SECTOR_BYTES),
            sector_bytes: SECTOR_BYTES,
            read_only: true,
            atomic: Atomic::None,
            discards: false,
            ..like
        };
        Self { properties, from }
    }
}

impl<F: ReadSource> Disk for ReadOnlyDisk<F> {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn read(&self, at: Extent, mut into: Block, _: Urgency) -> Pending<ReadAnswer> {
        let checked = self.properties.check_range(at, into.len());
        let done = checked.and_then(|()| {
            let mut bytes = vec![0; into.len()];
            let filled = self.from.read_exact_at(at.start_bytes, &mut bytes);
            filled.map_err(|error| error.into_read_error(at))?;
            into.copy_in(0, &bytes);
            Ok(())
        });
        Pending::ready(match done {
            Ok(()) => Ok(into),
            Err(error) => Err(Refused { payload: Some(into), error }),
        })
    }

    fn allocation_run(&self, at: Extent) -> Result<AllocationRun, DiskError> {
        self.properties.check_extents(&[at])?;
        self.from.allocation_run(at).map_err(|error| error.into_read_error(at))
    }
}
