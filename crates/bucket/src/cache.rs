//! Local read cache of a bucket, in a directory.
//!
//! ```text
//!   DIR/DRACONIS-CACHE        DIR/<sum of store, key and place>: | sum | up to 128 KiB of an object |
//! ```
//!
//! Law 1: cached bytes are verified: those with a wrong checksum are read from the bucket again.
//! Law 2: objects are immutable, so entries are never stale; the least recently used ones are
//! evicted.
//! Law 3: a directory with other contents is not touched. A failing cache is bypassed: the bucket
//! has everything.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bytes::Bytes;
use draconis_device::Error;
use draconis_types::lock::Mutex;
use draconis_types::path_bytes::ShowPath;
use twox_hash::XxHash3_64;

/// Unit of caching and of reads from the bucket, in bytes.
const CHUNK_BYTES: u64 = 128 << 10;
const MARKER_FILE_NAME: &str = "DRACONIS-CACHE";

pub(crate) struct ChunkCache {
    dir: PathBuf,
    max_bytes: u64,
    /// Id of the store.
    store: u128,
    kept: Mutex<LruIndex>,
}

/// Index of the files by their last use.
#[derive(Default)]
struct LruIndex {
    bytes: u64,
    tick: u64,
    by_use: BTreeMap<u64, String>,
    files: HashMap<String, (u64, u64)>,
}

impl LruIndex {
    fn touch(&mut self, file: &str, len: u64) {
        self.remove(file);
        self.tick += 1;
        self.bytes += len;
        self.by_use.insert(self.tick, file.to_owned());
        self.files.insert(file.to_owned(), (self.tick, len));
    }

    fn remove(&mut self, file: &str) {
        if let Some((tick, len)) = self.files.remove(file) {
            self.by_use.remove(&tick);
            self.bytes -= len;
        }
    }
}

impl ChunkCache {
    /// Opens the cache in a directory, which is created if it is missing.
    pub fn open(dir: &Path, max_bytes: u64, store: u128) -> Result<Self, String> {
        let said = |error: std::io::Error| format!("{}: {error}", dir.shown());
        std::fs::create_dir_all(dir).map_err(said)?;
        let mut files = vec![];
        let (mut is_marked, mut is_empty) = (false, true);
        for entry in std::fs::read_dir(dir).map_err(said)? {
            let entry = entry.map_err(said)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            is_marked |= name == MARKER_FILE_NAME;
            is_empty = false;
            // Deleted meanwhile, if there is no metadata: other processes use the cache, too.
            if let Ok(meta) = entry.metadata()
                && is_chunk(&name)
            {
                files.push((meta.modified().unwrap_or(SystemTime::UNIX_EPOCH), name, meta.len()));
            }
        }
        if !is_marked && !is_empty {
            let dir = dir.shown();
            return Err(format!(
                "{dir} holds something else; --cache takes a directory of its own"
            ));
        }
        std::fs::write(dir.join(MARKER_FILE_NAME), "What is in here can be deleted.\n")
            .map_err(said)?;
        files.sort();
        let mut kept = LruIndex::default();
        files.iter().for_each(|(_, name, len)| kept.touch(name, *len));
        let cache = Self { dir: dir.to_owned(), max_bytes, store, kept: Mutex::new(kept) };
        cache.evict();
        Ok(cache)
    }

    /// Reads a range of an object of `object_bytes`; `fetch` reads from the bucket.
    pub fn read(
        &self,
        key: &str,
        object_bytes: u64,
        (from, len): (u64, u64),
        fetch: impl Fn(u64, u64) -> Result<Bytes, Error>,
    ) -> Result<Bytes, Error> {
        let end = from + len;
        let first = from / CHUNK_BYTES;
        let count = end.div_ceil(CHUNK_BYTES) - first;
        let chunks: Vec<Option<Bytes>> =
            (first..first + count).map(|nth| self.get(key, nth, object_bytes)).collect();
        // One request reads all missing chunks.
        let is_missing = |chunk: &Option<Bytes>| chunk.is_none();
        let missing = chunks.iter().position(is_missing).zip(chunks.iter().rposition(is_missing));
        let mut all = vec![0; (count * CHUNK_BYTES) as usize];
        let mut put = |nth: u64, bytes: &[u8]| {
            let at = ((nth - first) * CHUNK_BYTES) as usize;
            all[at..at + bytes.len()].copy_from_slice(bytes);
        };
        for (nth, chunk) in (first..).zip(&chunks) {
            chunk.iter().for_each(|bytes| put(nth, bytes));
        }
        if let Some((low, high)) = missing {
            let begin = (first + low as u64) * CHUNK_BYTES;
            let until = ((first + high as u64 + 1) * CHUNK_BYTES).min(object_bytes);
            let bytes = fetch(begin, until - begin)?;
            for (nth, chunk) in (begin / CHUNK_BYTES..).zip(bytes.chunks(CHUNK_BYTES as usize)) {
                put(nth, chunk);
                self.insert(key, nth, chunk);
            }
        }
        let skip = (from - first * CHUNK_BYTES) as usize;
        Ok(Bytes::from(all).slice(skip..skip + len as usize))
    }

    fn chunk_hash(&self, key: &str, nth: u64) -> u64 {
        let text = format!("{:032x} {key} {nth}", self.store);
        XxHash3_64::oneshot(text.as_bytes())
    }

    fn get(&self, key: &str, nth: u64, object_bytes: u64) -> Option<Bytes> {
        let seed = self.chunk_hash(key, nth);
        let name = format!("{seed:016x}");
        let path = self.dir.join(&name);
        let expected = CHUNK_BYTES.min(object_bytes.checked_sub(nth * CHUNK_BYTES)?);
        let mut file = std::fs::File::open(&path).ok()?;
        let mut bytes = vec![];
        Read::by_ref(&mut file).take(CHUNK_BYTES + 9).read_to_end(&mut bytes).ok()?;
        let bytes = Bytes::from(bytes);
        let is_right = bytes.len() as u64 == expected + 8
            && bytes[..8] == XxHash3_64::oneshot_with_seed(seed, &bytes[8..]).to_le_bytes();
        let mut kept = self.kept.lock();
        if !is_right {
            kept.remove(&name);
            let _ = std::fs::remove_file(&path);
            return None;
        }
        kept.touch(&name, bytes.len() as u64);
        drop(kept);
        // The next process orders files by that.
        let _ = file.set_modified(SystemTime::now());
        Some(bytes.slice(8..))
    }

    fn insert(&self, key: &str, nth: u64, chunk: &[u8]) {
        let seed = self.chunk_hash(key, nth);
        let name = format!("{seed:016x}");
        let mut bytes = XxHash3_64::oneshot_with_seed(seed, chunk).to_le_bytes().to_vec();
        bytes.extend_from_slice(chunk);
        let unfinished = self.dir.join(format!("{name}.{}", std::process::id()));
        let kept = std::fs::File::create(&unfinished).and_then(|mut file| {
            file.write_all(&bytes)?;
            // By the readers' clock: that of file systems is coarser.
            file.set_modified(SystemTime::now())?;
            std::fs::rename(&unfinished, self.dir.join(&name))
        });
        match kept {
            Ok(()) => {
                self.kept.lock().touch(&name, bytes.len() as u64);
                self.evict();
            }
            Err(error) => {
                let _ = std::fs::remove_file(&unfinished);
                log::warn!("{}: nothing is kept: {error}", self.dir.shown());
            }
        }
    }

    fn evict(&self) {
        let mut kept = self.kept.lock();
        while kept.bytes > self.max_bytes
            && let Some((_, name)) = kept.by_use.pop_first()
        {
            kept.remove(&name);
            let _ = std::fs::remove_file(self.dir.join(&name));
        }
    }
}

fn is_chunk(name: &str) -> bool {
    name.len() == 16 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const OBJECT_LEN: u64 = 3 * CHUNK_BYTES + 1000;

    fn test_object() -> Bytes {
        (0..OBJECT_LEN).map(|at| ((at * 7) >> 3) as u8).collect::<Vec<_>>().into()
    }

    /// Reads, and returns the number of bytes that came from the bucket.
    fn read(cache: &ChunkCache, key: &str, from: u64, len: u64) -> u64 {
        let fetched = Cell::new(0);
        let bytes = cache.read(key, OBJECT_LEN, (from, len), |from, len| {
            fetched.set(fetched.get() + len);
            Ok(test_object().slice(from as usize..(from + len) as usize))
        });
        assert_eq!(bytes.unwrap(), test_object().slice(from as usize..(from + len) as usize));
        fetched.get()
    }

    fn chunk_files(dir: &Path) -> Vec<PathBuf> {
        let all = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        all.filter(|path| is_chunk(path.file_name().unwrap().to_str().unwrap())).collect()
    }

    #[test]
    fn cached_reads_are_shared_and_corruption_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let open = |store| ChunkCache::open(dir.path(), 1 << 30, store).unwrap();
        let cache = open(1);
        assert_eq!(read(&cache, "a", 10, 20), CHUNK_BYTES);
        assert_eq!(read(&cache, "a", 30, CHUNK_BYTES - 30), 0);
        assert_eq!(read(&cache, "a", 30, CHUNK_BYTES), CHUNK_BYTES);
        assert_eq!(read(&cache, "a", 0, OBJECT_LEN), CHUNK_BYTES + 1000);
        let cache = open(1);
        assert_eq!(read(&cache, "a", 0, OBJECT_LEN), 0);
        assert_eq!(read(&cache, "b", OBJECT_LEN - 5, 5), 1000);
        assert_eq!(read(&open(2), "a", 0, 5), CHUNK_BYTES, "another store");
        for (nth, path) in chunk_files(dir.path()).into_iter().enumerate() {
            let mut bytes = std::fs::read(&path).unwrap();
            match nth % 3 {
                0 => bytes.truncate(20),
                1 => bytes.push(0),
                _ => bytes[nth * 3] ^= 1,
            }
            std::fs::write(&path, bytes).unwrap();
        }
        assert_eq!(read(&cache, "a", 0, OBJECT_LEN), OBJECT_LEN);
        assert_eq!(read(&cache, "a", 0, OBJECT_LEN), 0);
    }

    #[test]
    fn least_recently_used_chunk_is_evicted() {
        let dir = tempfile::tempdir().unwrap();
        let cache = ChunkCache::open(dir.path(), 3 * (CHUNK_BYTES + 8), 1).unwrap();
        for key in ["a", "b", "c", "a", "d"] {
            read(&cache, key, 0, 1);
        }
        assert_eq!(chunk_files(dir.path()).len(), 3);
        let fetched: Vec<u64> = ["a", "c", "d"].map(|key| read(&cache, key, 0, 1)).into();
        assert_eq!(fetched, [0, 0, 0]);
        assert_eq!(read(&cache, "b", 0, 1), CHUNK_BYTES);
        let smaller = ChunkCache::open(dir.path(), CHUNK_BYTES + 8, 1).unwrap();
        assert_eq!((chunk_files(dir.path()).len(), read(&smaller, "b", 0, 1)), (1, 0));
    }

    #[test]
    fn foreign_directory_is_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("letters"), "dear").unwrap();
        let said = ChunkCache::open(dir.path(), 1, 1).err().expect("it is refused");
        assert!(said.contains("holds something else"), "{said}");
        assert!(!dir.path().join(MARKER_FILE_NAME).exists());
    }
}
