//! The file contract, served by a volume.

use draconis_exchange::contract::file::{
    Fallocate, FileServer, GetAttributes, Read, Seek, Sync as SyncFile, Write,
};
use draconis_exchange::contract::tree::Tree;
use draconis_ext::InodeNumber;
use draconis_types::SharedSlice;
use draconis_types::{AttributeChange, Attributes, Node, Refusal, clear_suid_sgid};

use super::{VolumeTree, inode_of_node, log_and_get_refusal};

/// Maximum length of one write from a buffer that is not private memory, in bytes.
const WRITE_CHUNK_BYTES: usize = 128 << 10;

/// One file of a volume.
#[derive(Clone, Copy)]
pub struct VolumeFile<'a> {
    tree: &'a VolumeTree,
    node: Node,
}

impl<'a> VolumeFile<'a> {
    pub(super) fn new(tree: &'a VolumeTree, node: Node) -> Self {
        Self { tree, node }
    }
}

impl FileServer for VolumeFile<'_> {
    fn read(&self, request: &mut Read) -> Result<u32, Refusal> {
        if !request.is_in_bounds() {
            return Err(Refusal::Invalid);
        }
        let node = inode_of_node(self.node)?;
        let mut done = 0;
        // The library stops before damage, and at the ends of its slices. A short result means the
        // end of the file here: the kernel would truncate there.
        while done < request.len {
            let (at, left) = (request.offset + u64::from(done), request.len - done);
            let piece =
                self.tree.volume.read(node, at, left as usize).map_err(log_and_get_refusal)?;
            if piece.is_empty() {
                break;
            }
            let at = (request.buffer_offset + done) as usize;
            done += request.buffer.put_slice(at, SharedSlice::new(piece)) as u32;
        }
        if !request.no_atime {
            self.tree.record_access(self.node);
        }
        Ok(done)
    }

    fn write(&self, request: &mut Write) -> Result<u32, Refusal> {
        if !request.is_in_bounds() {
            return Err(Refusal::Invalid);
        }
        let node = inode_of_node(self.node)?;
        if request.clear_privileges {
            self.clear_privileges(node)?;
        }
        let (from, len) = (request.buffer_offset as usize, request.len as usize);
        let (volume, offset) = (&self.tree.volume, request.offset);
        let written = match (request.buffer.shared_slices(), request.buffer.bytes()) {
            ([lent], _) if lent.len() >= from + len => volume
                .write_shared(node, offset, &lent.slice(from..from + len))
                .map_err(log_and_get_refusal)?,
            (_, Some(bytes)) => {
                volume.write(node, offset, &bytes[from..from + len]).map_err(log_and_get_refusal)?
            }
            // Shared memory cannot be passed to the library: copy it in private chunks.
            _ => self.write_chunks(node, request)?,
        };
        self.tree.sync_data_change()?;
        Ok(written as u32)
    }

    fn get_attributes(&self, _: &mut GetAttributes) -> Result<Attributes, Refusal> {
        self.tree.attributes(inode_of_node(self.node)?)
    }

    fn seek(&self, request: &mut Seek) -> Result<Option<u64>, Refusal> {
        let what = if request.hole { draconis_ext::Seek::Hole } else { draconis_ext::Seek::Data };
        self.tree
            .volume
            .seek(inode_of_node(self.node)?, request.offset, what)
            .map_err(log_and_get_refusal)
    }

    fn fallocate(&self, request: &mut Fallocate) -> Result<(), Refusal> {
        let Fallocate { offset, len, how } = *request;
        self.tree
            .volume
            .fallocate(inode_of_node(self.node)?, offset, len, how)
            .map_err(log_and_get_refusal)?;
        self.tree.sync_data_change()
    }

    fn sync(&self, request: &mut SyncFile) -> Result<(), Refusal> {
        self.tree.sync_files(&[(self.node, request.data_only)])
    }
}

impl VolumeFile<'_> {
    fn write_chunks(&self, node: InodeNumber, request: &Write) -> Result<usize, Refusal> {
        let len = request.len as usize;
        let mut piece = vec![0; len.min(WRITE_CHUNK_BYTES)];
        let mut done = 0;
        while done < len {
            let want = (len - done).min(piece.len());
            request.buffer.copy_out(request.buffer_offset as usize + done, &mut piece[..want]);
            let at = request.offset + done as u64;
            match self.tree.volume.write(node, at, &piece[..want]) {
                Ok(written) => done += written,
                // Report the data written before the error.
                Err(_) if done > 0 => break,
                Err(error) => return Err(log_and_get_refusal(error)),
            }
            if !done.is_multiple_of(WRITE_CHUNK_BYTES) {
                break;
            }
        }
        Ok(done)
    }

    fn clear_privileges(&self, node: InodeNumber) -> Result<(), Refusal> {
        let volume = &self.tree.volume;
        let now = volume.attributes(node).map_err(log_and_get_refusal)?;
        let left = clear_suid_sgid(now.mode, now.gid, None);
        if left == now.mode {
            return Ok(());
        }
        let change = AttributeChange { mode: Some(left), ..AttributeChange::default() };
        volume.set_attributes(node, &change).map(drop).map_err(log_and_get_refusal)
    }
}
