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
use parking_lot::Mutex;
use twox_hash::XxHash3_64;

/// Unit of caching and of reads from the bucket, in bytes.
const CHUNK: u64 = 128 << 10;
const MARK: &str = "DRACONIS-CACHE";

pub(crate) struct Cache {
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
    fn used(&mut self, file: &str, len: u64) {
        self.forget(file);
        self.tick += 1;
        self.bytes += len;
        self.by_use.insert(self.tick, file.to_owned());
        self.files.insert(file.to_owned(), (self.tick, len));
    }

    fn forget(&mut self, file: &str) {
        if let Some((tick, len)) = self.files.remove(file) {
            self.by_use.remove(&tick);
            self.bytes -= len;
        }
    }
}

impl Cache {
    /// Opens the cache in a directory, which is created if it is missing.
    pub fn open(dir: &Path, most_bytes: u64, store: u128) -> Result<Self, String> {
        let said = |error: std::io::Error| format!("{}: {error}", dir.display());
        std::fs::create_dir_all(dir).map_err(said)?;
        let mut files = vec![];
        let (mut is_marked, mut is_empty) = (false, true);
        for entry in std::fs::read_dir(dir).map_err(said)? {
            let entry = entry.map_err(said)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            is_marked |= name == MARK;
            is_empty = false;
            // Deleted meanwhile, if there is no metadata: other processes use the cache, too.
            if let Ok(meta) = entry.metadata()
                && is_chunk(&name)
            {
                files.push((meta.modified().unwrap_or(SystemTime::UNIX_EPOCH), name, meta.len()));
            }
        }
        if !is_marked && !is_empty {
            let dir = dir.display();
            return Err(format!(
                "{dir} holds something else; --cache takes a directory of its own"
            ));
        }
        std::fs::write(dir.join(MARK), "What is in here can be deleted.\n").map_err(said)?;
        files.sort();
        let mut kept = LruIndex::default();
        files.iter().for_each(|(_, name, len)| kept.used(name, *len));
        let cache =
            Self { dir: dir.to_owned(), max_bytes: most_bytes, store, kept: Mutex::new(kept) };
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
        let first = from / CHUNK;
        let count = end.div_ceil(CHUNK) - first;
        let chunks: Vec<Option<Bytes>> =
            (first..first + count).map(|nth| self.get(key, nth, object_bytes)).collect();
        // One request reads all missing chunks.
        let is_missing = |chunk: &Option<Bytes>| chunk.is_none();
        let missing = chunks.iter().position(is_missing).zip(chunks.iter().rposition(is_missing));
        let mut all = vec![0; (count * CHUNK) as usize];
        let mut put = |nth: u64, bytes: &[u8]| {
            let at = ((nth - first) * CHUNK) as usize;
            all[at..at + bytes.len()].copy_from_slice(bytes);
        };
        for (nth, chunk) in (first..).zip(&chunks) {
            chunk.iter().for_each(|bytes| put(nth, bytes));
        }
        if let Some((low, high)) = missing {
            let begin = (first + low as u64) * CHUNK;
            let until = ((first + high as u64 + 1) * CHUNK).min(object_bytes);
            let bytes = fetch(begin, until - begin)?;
            for (nth, chunk) in (begin / CHUNK..).zip(bytes.chunks(CHUNK as usize)) {
                put(nth, chunk);
                self.insert(key, nth, chunk);
            }
        }
        let skip = (from - first * CHUNK) as usize;
        Ok(Bytes::from(all).slice(skip..skip + len as usize))
    }

    fn seed(&self, key: &str, nth: u64) -> u64 {
        let text = format!("{:032x} {key} {nth}", self.store);
        XxHash3_64::oneshot(text.as_bytes())
    }

    fn get(&self, key: &str, nth: u64, object_bytes: u64) -> Option<Bytes> {
        let seed = self.seed(key, nth);
        let name = format!("{seed:016x}");
        let path = self.dir.join(&name);
        let expected = CHUNK.min(object_bytes.checked_sub(nth * CHUNK)?);
        let mut file = std::fs::File::open(&path).ok()?;
        let mut bytes = vec![];
        Read::by_ref(&mut file).take(CHUNK + 9).read_to_end(&mut bytes).ok()?;
        let bytes = Bytes::from(bytes);
        let is_right = bytes.len() as u64 == expected + 8
            && bytes[..8] == XxHash3_64::oneshot_with_seed(seed, &bytes[8..]).to_le_bytes();
        let mut kept = self.kept.lock();
        if !is_right {
            kept.forget(&name);
            let _ = std::fs::remove_file(&path);
            return None;
        }
        kept.used(&name, bytes.len() as u64);
        drop(kept);
        // The next process orders files by that.
        let _ = file.set_modified(SystemTime::now());
        Some(bytes.slice(8..))
    }

    fn insert(&self, key: &str, nth: u64, chunk: &[u8]) {
        let seed = self.seed(key, nth);
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
                self.kept.lock().used(&name, bytes.len() as u64);
                self.evict();
            }
            Err(error) => {
                let _ = std::fs::remove_file(&unfinished);
                log::warn!("{}: nothing is kept: {error}", self.dir.display());
            }
        }
    }

    fn evict(&self) {
        let mut kept = self.kept.lock();
        while kept.bytes > self.max_bytes
            && let Some((_, name)) = kept.by_use.pop_first()
        {
            kept.forget(&name);
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

    const LEN: u64 = 3 * CHUNK + 1000;

    fn object() -> Bytes {
        (0..LEN).map(|at| ((at * 7) >> 3) as u8).collect::<Vec<_>>().into()
    }

    /// Reads, and returns the number of bytes that came from the bucket.
    fn read(cache: &Cache, key: &str, from: u64, len: u64) -> u64 {
        let fetched = Cell::new(0);
        let bytes = cache.read(key, LEN, (from, len), |from, len| {
            fetched.set(fetched.get() + len);
            Ok(object().slice(from as usize..(from + len) as usize))
        });
        assert_eq!(bytes.unwrap(), object().slice(from as usize..(from + len) as usize));
        fetched.get()
    }

    fn files(dir: &Path) -> Vec<PathBuf> {
        let all = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        all.filter(|path| is_chunk(path.file_name().unwrap().to_str().unwrap())).collect()
    }

    #[test]
    fn what_was_read_is_not_fetched_again_by_any_process_and_rot_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let open = |store| Cache::open(dir.path(), 1 << 30, store).unwrap();
        let cache = open(1);
        assert_eq!(read(&cache, "a", 10, 20), CHUNK);
        assert_eq!(read(&cache, "a", 30, CHUNK - 30), 0);
        assert_eq!(read(&cache, "a", 30, CHUNK), CHUNK);
        assert_eq!(read(&cache, "a", 0, LEN), CHUNK + 1000);
        let cache = open(1);
        assert_eq!(read(&cache, "a", 0, LEN), 0);
        assert_eq!(read(&cache, "b", LEN - 5, 5), 1000);
        assert_eq!(read(&open(2), "a", 0, 5), CHUNK, "another store");
        for (nth, path) in files(dir.path()).into_iter().enumerate() {
            let mut bytes = std::fs::read(&path).unwrap();
            match nth % 3 {
                0 => bytes.truncate(20),
                1 => bytes.push(0),
                _ => bytes[nth * 3] ^= 1,
            }
            std::fs::write(&path, bytes).unwrap();
        }
        assert_eq!(read(&cache, "a", 0, LEN), LEN);
        assert_eq!(read(&cache, "a", 0, LEN), 0);
    }

    #[test]
    fn what_was_not_used_for_longest_goes() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path(), 3 * (CHUNK + 8), 1).unwrap();
        for key in ["a", "b", "c", "a", "d"] {
            read(&cache, key, 0, 1);
        }
        assert_eq!(files(dir.path()).len(), 3);
        let fetched: Vec<u64> = ["a", "c", "d"].map(|key| read(&cache, key, 0, 1)).into();
        assert_eq!(fetched, [0, 0, 0]);
        assert_eq!(read(&cache, "b", 0, 1), CHUNK);
        let smaller = Cache::open(dir.path(), CHUNK + 8, 1).unwrap();
        assert_eq!((files(dir.path()).len(), read(&smaller, "b", 0, 1)), (1, 0));
    }

    #[test]
    fn a_directory_with_something_else_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("letters"), "dear").unwrap();
        let said = Cache::open(dir.path(), 1, 1).err().expect("it is refused");
        assert!(said.contains("holds something else"), "{said}");
        assert!(!dir.path().join(MARK).exists());
    }
}
