//! Disks inside image files, for any mapping between the two.
//!
//! ```text
//!   read ──▶ ImageMap::find: longest run from here ──▶ zeros · file · chunk · backing file
//! ```
//! Law: sequential reads decompress each chunk once. The cache of decompressed chunks is bounded.

use std::collections::VecDeque;
use std::sync::Arc;

use draconis_device::{AllocationRun, Disk, Extent};
use draconis_types::lock::Mutex;

use crate::Error;
use crate::backing::reference::BackingFile;
use crate::image_file::ImageFile;
use crate::read_only::{ReadOnlyDisk, ReadSource};

/// Maximum cached chunks, and their bytes; the latest one is always cached.
const MAX_CACHED_CHUNKS: usize = 16;
const MAX_CACHED_BYTES: usize = 32 << 20;
/// Maximum size of a decompressed chunk.
pub(crate) const MAX_CHUNK_BYTES: u64 = 2 << 20;

/// Location of bytes of the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Location {
    /// Zeros.
    Zeros,
    /// At this offset of the file.
    File(u64),
    /// At offset `skip` of the chunk that [`ImageMap::decompress_chunk`] returns for `piece`.
    Compressed { piece: u64, skip: u64 },
    /// At this offset of the backing file.
    Backing(u64),
}

/// Mapping of a disk to a file.
pub(crate) trait ImageMap: Send + Sync {
    /// Returns the length of the disk.
    fn len_bytes(&self) -> u64;

    /// Returns the location of disk offset `at`, and the number of bytes that are contiguous there:
    /// at least one.
    fn find(&self, file: &ImageFile, at: u64) -> Result<(Location, u64), Error>;

    /// Returns the backing file, if the image has one.
    fn backing_file(&self) -> Option<&BackingFile> {
        None
    }

    /// Decompresses a chunk.
    fn decompress_chunk(&self, _: &ImageFile, _: u64) -> Result<Vec<u8>, Error> {
        Err(Error::Damaged("nothing in it is packed"))
    }
}

/// Recently decompressed chunks, by their identifier in the file.
#[derive(Default)]
pub(crate) struct DecompressedCache(Mutex<VecDeque<(u64, Arc<Vec<u8>>)>>);

impl DecompressedCache {
    /// Forgets all chunks: their identifiers may stand for others from now on.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }

    /// Fills `room` from `place`, in the file or its backing file.
    pub(crate) fn read(
        &self,
        file: &ImageFile,
        behind: Option<&Arc<dyn Disk>>,
        place: Location,
        room: &mut [u8],
        unpack: &mut dyn FnMut(u64) -> Result<Vec<u8>, Error>,
    ) -> Result<(), Error> {
        match place {
            Location::Zeros => room.fill(0),
            Location::File(from) => file.read(from, room)?,
            Location::Compressed { piece, skip } => {
                let unpacked = self.get_or_decompress(piece, unpack)?;
                let skip = usize::try_from(skip).unwrap_or(usize::MAX);
                let there = unpacked.get(skip..).unwrap_or_default();
                let there = there.get(..room.len());
                room.copy_from_slice(there.ok_or(Error::Damaged("a packed piece is short"))?);
            }
            Location::Backing(from) => read_backing(behind, from, room)?,
        }
        Ok(())
    }

    fn get_or_decompress(
        &self,
        piece: u64,
        unpack: &mut dyn FnMut(u64) -> Result<Vec<u8>, Error>,
    ) -> Result<Arc<Vec<u8>>, Error> {
        let lock = || self.0.lock();
        if let Some((_, bytes)) = lock().iter().find(|(kept, _)| *kept == piece) {
            return Ok(bytes.clone());
        }
        let bytes = Arc::new(unpack(piece)?);
        let mut kept = lock();
        kept.push_back((piece, bytes.clone()));
        let sum = |kept: &VecDeque<(u64, Arc<Vec<u8>>)>| kept.iter().map(|(_, it)| it.len()).sum();
        while kept.len() > MAX_CACHED_CHUNKS || kept.len() > 1 && MAX_CACHED_BYTES < sum(&kept) {
            kept.pop_front();
        }
        Ok(bytes)
    }
}

/// Reads from the backing file, which reads as zeros past its end.
fn read_backing(behind: Option<&Arc<dyn Disk>>, from: u64, room: &mut [u8]) -> Result<(), Error> {
    room.fill(0);
    let Some(behind) = behind else { return Ok(()) };
    let left = behind.properties().len_bytes.saturating_sub(from);
    let len = room.len().min(usize::try_from(left).unwrap_or(usize::MAX));
    match room.get_mut(..len) {
        Some(room) => ImageFile::new(behind.clone()).read(from, room),
        None => Ok(()),
    }
}

/// Returns the state of the start of `at`, which is at `place` for `run` bytes.
pub(crate) fn allocation_of(
    place: Location,
    run: u64,
    at: Extent,
    behind: Option<&Arc<dyn Disk>>,
) -> Result<AllocationRun, Error> {
    let len_bytes = run.clamp(1, at.len_bytes.max(1));
    let is_hole = match place {
        Location::File(_) | Location::Compressed { .. } => false,
        Location::Zeros => true,
        Location::Backing(from) => match behind {
            Some(behind) if from < behind.properties().len_bytes => {
                let left = behind.properties().len_bytes - from;
                return Ok(behind.allocation_run(Extent::new(from, len_bytes.min(left)))?);
            }
            _ => true,
        },
    };
    Ok(AllocationRun { len_bytes, is_hole })
}

/// Contents of a disk inside a file.
struct ImageSource<M> {
    file: ImageFile,
    map: M,
    behind: Option<Arc<dyn Disk>>,
    pieces: DecompressedCache,
}

/// Opens the disk that `map` locates in a file.
pub(crate) fn open_mapped<M: ImageMap + 'static>(
    file: ImageFile,
    map: M,
    behind: Option<Arc<dyn Disk>>,
) -> Arc<dyn Disk> {
    let (len_bytes, like) = (map.len_bytes(), file.disk().properties());
    let from = ImageSource { file, map, behind, pieces: DecompressedCache::default() };
    Arc::new(ReadOnlyDisk::new(len_bytes, like, from))
}

impl<M: ImageMap> ReadSource for ImageSource<M> {
    fn read_exact_at(&self, at_bytes: u64, into: &mut [u8]) -> Result<(), Error> {
        let mut done = 0;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let (place, run) = self.map.find(&self.file, at_bytes + done as u64)?;
            let len = rest.len().min(usize::try_from(run).unwrap_or(usize::MAX)).max(1);
            let Some(room) = rest.get_mut(..len) else { break };
            let mut unpack = |piece| self.map.decompress_chunk(&self.file, piece);
            self.pieces.read(&self.file, self.behind.as_ref(), place, room, &mut unpack)?;
            done += len;
        }
        Ok(())
    }

    fn allocation_run(&self, at: Extent) -> Result<AllocationRun, Error> {
        let (place, run) = self.map.find(&self.file, at.start_bytes)?;
        allocation_of(place, run, at, self.behind.as_ref())
    }
}
