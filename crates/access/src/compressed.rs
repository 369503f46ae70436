//! Compressed images: decompressed into an unnamed temporary file for one user.
//!
//! Compressed formats with an index are read in place instead.
//!
//! Law: the temporary file is opened before the process confines itself, and filled afterwards.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::Context;
use draconis_container::compression::{Compression, MAGIC_BYTES};
use draconis_types::path_bytes::ShowPath;

use crate::populate::{Blob, temporary_file};

/// Size of the pieces that are decompressed at once; a piece of zeros becomes a hole.
const READ_CHUNK_BYTES: usize = 64 << 10;
/// Offset and value of the ext superblock magic, which takes precedence over other signatures.
const EXT_MAGIC: (u64, [u8; 2]) = (1080, [0x53, 0xEF]);

/// A compressed image and the temporary file that it is decompressed to.
pub struct CompressedImage {
    packing: Compression,
    archive: Blob,
    output: File,
}

/// Detects a compressed image by its first bytes.
///
/// # Errors
/// The image cannot be read, or the temporary file cannot be created.
pub fn detect(file: &File, image: &Path) -> anyhow::Result<Option<CompressedImage>> {
    let mut head = [0; MAGIC_BYTES];
    let len = file.read_at(&mut head, 0).with_context(|| image.shown().to_string())?;
    let Some(packing) = Compression::detect(head.get(..len).unwrap_or_default()) else {
        return Ok(None);
    };
    let mut mark = [0; 2];
    if matches!(file.read_at(&mut mark, EXT_MAGIC.0), Ok(2)) && mark == EXT_MAGIC.1 {
        return Ok(None);
    }
    let archive = Blob::new(file.try_clone()?, image)?;
    Ok(Some(CompressedImage { packing, archive, output: temporary_file(image)? }))
}

impl CompressedImage {
    /// Decompresses the image; holes stay holes. Reports bytes to `progress`.
    ///
    /// # Errors
    /// The image is damaged, exceeds the size limit, or the disk is full.
    pub fn unpack(self, image: &Path, progress: &mut dyn FnMut(u64)) -> anyhow::Result<File> {
        let program = self.packing.decompressor_name();
        let what = || format!("{}: compressed with {program}", image.shown());
        let stream = self.archive.decompress(None);
        let mut stream = stream.with_context(|| image.shown().to_string())?;
        let mut piece = vec![0; READ_CHUNK_BYTES];
        let mut at = 0;
        let mut hole = false;
        loop {
            let mut len = 0;
            while len < piece.len() {
                match stream.read(&mut piece[len..]).with_context(what)? {
                    0 => break,
                    got => len += got,
                }
            }
            let bytes = &piece[..len];
            if len == 0 {
                // A hole at the end gets its length by writing its last byte.
                if hole {
                    self.output.write_all_at(&[0], at - 1).with_context(what)?;
                }
                return Ok(self.output);
            }
            hole = bytes.iter().all(|byte| *byte == 0);
            if !hole {
                self.output.write_all_at(bytes, at).with_context(what)?;
            }
            at += len as u64;
            progress(len as u64);
        }
    }
}
