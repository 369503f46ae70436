//! Opening a store by name.

use std::path::Path;

use anyhow::bail;

use crate::kv::{KvSubject, StoreOptions};

/// Opens a store by name, in a directory that is created if missing.
///
/// # Errors
/// The store fails, or this program was built without it.
#[allow(unused_variables)]
pub fn open(name: &str, dir: &Path, how: StoreOptions) -> anyhow::Result<Box<dyn KvSubject>> {
    std::fs::create_dir_all(dir)?;
    match name {
        #[cfg(feature = "leveldb")]
        "leveldb" => Ok(Box::new(crate::cxx::leveldb::Store::open(dir, how)?)),
        #[cfg(feature = "rocksdb")]
        "rocksdb" => Ok(Box::new(crate::cxx::rocksdb::Store::open(dir, how)?)),
        #[cfg(feature = "lmdb")]
        "lmdb" => Ok(Box::new(crate::lmdb::Lmdb::open(dir, how)?)),
        #[cfg(feature = "redb")]
        "redb" => Ok(Box::new(crate::redb_store::Redb::open(dir, how)?)),
        #[cfg(feature = "fjall")]
        "fjall" => Ok(Box::new(crate::fjall_store::Fjall::open(dir, how)?)),
        #[cfg(feature = "draconis-kv")]
        "draconis-kv" => Ok(Box::new(crate::draconis_store::DraconisKv::open(dir, how)?)),
        #[cfg(feature = "slatedb")]
        "slatedb" => Ok(Box::new(crate::slate_store::Slate::open(dir, how)?)),
        other => bail!("this program was built without {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::STORE_NAMES;

    #[test]
    fn every_store_keeps_puts() {
        for store in STORE_NAMES {
            for durable in [false, true] {
                let dir = tempfile::tempdir().unwrap();
                let how = StoreOptions {
                    durable,
                    cache_bytes: Some(8 << 20),
                    scarce: durable,
                    calls: durable,
                };
                let store = open(store, &dir.path().join("db"), how).unwrap();
                let pairs: Vec<_> = (0..100u8).rev().map(|n| (vec![n; 16], vec![n; 50])).collect();
                store.load(&pairs).unwrap();
                store.put(b"a key", b"a value").unwrap();
                assert_eq!(store.get(b"a key").unwrap().as_deref(), Some(&b"a value"[..]));
                store.delete(b"a key").unwrap();
                assert_eq!(store.get(b"a key").unwrap(), None);
                store.sync().unwrap();
                let mut seen = vec![];
                let mut look = |key: &[u8], value: &[u8]| {
                    seen.extend((key.len() == 16).then(|| (key.to_vec(), value.to_vec())));
                    true
                };
                store.scan(&mut look).unwrap();
                assert!(seen.iter().eq(pairs.iter().rev()));
            }
        }
    }
}
