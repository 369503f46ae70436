//! Android sparse images, as written by `img2simg` and `fastboot`, also split into several files.
//!
//! ```text
//!   | header | chunk: raw, fill, don't care, CRC32 | chunk | ..
//!   system.img_sparsechunk.0 ◀── .1 ◀── .2: missing chunks are in earlier files
//! ```

use std::sync::Arc;

use draconis_device::Disk;

use crate::image_file::{ImageFile, le16, le32};
use crate::image_map::{ImageMap, Location, open_mapped};
use crate::{Error, Format, UnsupportedFeature};

/// Maximum chunks of one image.
const MAX_CHUNKS: u32 = 4 << 20;
/// Maximum files of a split image.
const MAX_FILES: u32 = 64;

/// Opens the disk in a file and in the further files of a split image, in order.
pub(crate) fn open(file: ImageFile, others: &[Arc<dyn Disk>]) -> Result<Arc<dyn Disk>, Error> {
    let first = AndroidSparseImage::open(&file)?;
    let len_bytes = first.len_bytes;
    let mut joined = open_mapped(file, first, None);
    for other in others {
        let source = ImageFile::new(other.clone());
        let head = source.read_vec(0, source.len_bytes().min(28) as usize)?;
        if Format::detect(&head) != Some(Format::Android) {
            return Err(Error::Damaged(
                "Android sparse image: a file that it is split into is none",
            ));
        }
        let next = AndroidSparseImage::open(&source)?;
        if next.len_bytes != len_bytes {
            return Err(Error::Damaged("Android sparse image: files of disks of several lengths"));
        }
        joined = open_mapped(source, next, Some(joined));
    }
    Ok(joined)
}

/// Position of a file in a split image.
pub struct SplitImagePosition {
    /// Name of the first file.
    pub first: String,
    /// Names of all possible files after the named one.
    pub following: Vec<String>,
}

/// Returns the position of the file called `name`, if it ends with `chunk` and a number, as in
/// `system.img_sparsechunk.0`.
pub fn split_image_position(name: &str) -> Option<SplitImagePosition> {
    let digits = name.len() - name.trim_end_matches(|last: char| last.is_ascii_digit()).len();
    let (beginning, number) = name.split_at_checked(name.len() - digits)?;
    let before = beginning.trim_end_matches(['.', '_', '-']);
    let is_chunk = before.len().checked_sub(5).and_then(|at| before.get(at..));
    if digits == 0 || !is_chunk?.eq_ignore_ascii_case("chunk") {
        return None;
    }
    let number: u32 = number.parse().ok()?;
    let named = |number: u32| format!("{beginning}{number:0digits$}");
    let following = number.saturating_add(1)..MAX_FILES;
    Some(SplitImagePosition { first: named(0), following: following.map(named).collect() })
}

/// Start in the disk, and contents.
struct Chunk {
    start: u64,
    what: ChunkKind,
}

enum ChunkKind {
    Raw(u64),
    Fill([u8; 4]),
    Nothing,
}

pub(crate) struct AndroidSparseImage {
    len_bytes: u64,
    chunks: Vec<Chunk>,
}

impl AndroidSparseImage {
    pub(crate) fn open(file: &ImageFile) -> Result<Self, Error> {
        let head = file.read_vec(0, 28)?;
        if le16(&head, 4) != 1 {
            return Err(
                UnsupportedFeature::Version("Android sparse image", le16(&head, 4).into()).into()
            );
        }
        let (head_bytes, chunk_bytes) = (u64::from(le16(&head, 8)), u64::from(le16(&head, 10)));
        let block = u64::from(le32(&head, 12));
        let (blocks, count) = (u64::from(le32(&head, 16)), le32(&head, 20));
        let possible = block.is_multiple_of(4) && (4..=1 << 20).contains(&block);
        if !possible || head_bytes < 28 || chunk_bytes < 12 || count > MAX_CHUNKS {
            return Err(Error::Damaged("Android sparse image: an impossible header"));
        }
        let len_bytes = blocks * block;
        let (mut at, mut start) = (head_bytes, 0);
        let mut chunks = vec![];
        for _ in 0..count {
            let head = file.read_vec(at, 12)?;
            let (kind, len) = (le16(&head, 0), u64::from(le32(&head, 4)) * block);
            let total = u64::from(le32(&head, 8));
            let data = at + chunk_bytes;
            let counted = total.checked_sub(chunk_bytes);
            let fits = |bytes: u64| counted == Some(bytes);
            match kind {
                0xCAC1 if fits(len) => chunks.push(Chunk { start, what: ChunkKind::Raw(data) }),
                0xCAC2 if fits(4) => {
                    let mut fill = [0; 4];
                    file.read(data, &mut fill)?;
                    chunks.push(Chunk { start, what: ChunkKind::Fill(fill) });
                }
                0xCAC3 if fits(0) => chunks.push(Chunk { start, what: ChunkKind::Nothing }),
                0xCAC4 => {}
                _ => return Err(Error::Damaged("Android sparse image: an impossible chunk")),
            }
            at = at.saturating_add(total);
            if kind != 0xCAC4 {
                start += len;
            }
            if start > len_bytes {
                return Err(Error::Damaged("Android sparse image: chunks beyond its length"));
            }
        }
        if start < len_bytes {
            chunks.push(Chunk { start, what: ChunkKind::Nothing });
        }
        Ok(Self { len_bytes, chunks })
    }
}

impl ImageMap for AndroidSparseImage {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn find(&self, _: &ImageFile, at: u64) -> Result<(Location, u64), Error> {
        let behind = self.chunks.partition_point(|chunk| chunk.start <= at);
        let end = self.chunks.get(behind).map_or(self.len_bytes, |next| next.start);
        let run = end.saturating_sub(at).max(1);
        let chunk = behind.checked_sub(1).and_then(|nth| self.chunks.get(nth));
        Ok(match chunk {
            Some(Chunk { start, what: ChunkKind::Raw(from) }) => {
                (Location::File(from + (at - start)), run)
            }
            Some(Chunk { what: ChunkKind::Nothing, .. }) | None => (Location::Backing(at), run),
            Some(Chunk { what: ChunkKind::Fill([0, 0, 0, 0]), .. }) => (Location::Zeros, run),
            Some(Chunk { what: ChunkKind::Fill(bytes), .. }) => {
                // A page of the pattern, which may start anywhere in it.
                let piece = u64::from(u32::from_le_bytes(*bytes));
                (Location::Compressed { piece, skip: at % 4096 }, run.min(4096 - at % 4096))
            }
        })
    }

    fn decompress_chunk(&self, _: &ImageFile, piece: u64) -> Result<Vec<u8>, Error> {
        Ok((piece as u32).to_le_bytes().repeat(1024))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{memory_disk, read_all, sample_contents};

    #[test]
    #[ignore = "tools: simg2img"]
    fn split_image_is_joined_like_simg2img() {
        let dir = tempfile::tempdir().unwrap();
        let raw = [sample_contents(1 << 20), vec![0; 1 << 18], sample_contents(1 << 19)].concat();
        std::fs::write(dir.path().join("raw"), &raw).unwrap();
        let run = |line: &str| {
            let mut shell = std::process::Command::new("sh");
            let output = shell.args(["-c", line]).current_dir(dir.path()).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        if std::process::Command::new("simg2simg").output().is_err() {
            draconis_testkit::report_skipped("split Android images need simg2simg and simg2img");
            return;
        }
        run(
            "img2simg raw s && simg2simg s s_sparsechunk 400000 && simg2img s_sparsechunk.* joined",
        );
        let read = |nth: u32| std::fs::read(dir.path().join(format!("s_sparsechunk.{nth}"))).ok();
        let files: Vec<_> = (0..).map_while(read).map(memory_disk).collect();
        assert!(files.len() > 2, "{}", files.len());
        let opened = crate::open(files[0].clone(), &files[1..]).unwrap();
        let joined = std::fs::read(dir.path().join("joined")).unwrap();
        assert!(read_all(&*opened.disk).unwrap() == joined && joined == raw);
        // Files that are no Android sparse images are errors.
        for other in [memory_disk(vec![0; 4096]), memory_disk(vec![])] {
            assert!(crate::open(files[0].clone(), &[other]).is_err());
        }
    }

    #[test]
    fn split_image_names_are_parsed() {
        let found = |name: &str| {
            let SplitImagePosition { first, following } = split_image_position(name)?;
            Some((first, following.into_iter().next()))
        };
        for (name, first, next) in [
            ("system.img_sparsechunk.0", "system.img_sparsechunk.0", "system.img_sparsechunk.1"),
            ("super_sparsechunk9", "super_sparsechunk0", "super_sparsechunk10"),
            ("a.CHUNK_008", "a.CHUNK_000", "a.CHUNK_009"),
        ] {
            assert_eq!(found(name), Some((first.into(), Some(next.into()))));
        }
        for name in ["disk.0", "chunk", "", "7", "system.img", "chunk.99999999999", "xchunk.0.img"]
        {
            assert_eq!(found(name), None, "{name}");
        }
        assert_eq!(found("chunk.99").unwrap().1, None);
    }
}
