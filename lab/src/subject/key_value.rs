//! A key-value store, ours or another, driven by the helper program.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, bail};

use super::{RunEnvironment, Subject, SubjectFiles, SubjectKind};
use crate::clock::{Clock, WallClock};

/// A key-value store.
pub struct KeyValue {
    name: String,
    clock: Arc<WallClock>,
}

impl KeyValue {
    /// Returns the store with a name.
    ///
    /// # Errors
    /// The helper is missing, or was built without this store.
    pub fn new(name: &str, shop: &RunEnvironment) -> anyhow::Result<Self> {
        let stores = list_stores(&shop.peers)?;
        if !stores.iter().any(|store| store == name) {
            let package = match name {
                "leveldb" => ", and libleveldb-dev",
                "rocksdb" => ", and librocksdb-dev",
                _ => "",
            };
            bail!("draconis-lab-peers built with --features {name}{package}");
        }
        Ok(Self { name: name.into(), clock: Arc::new(WallClock::new()) })
    }
}

/// Returns the stores that the helper was built with.
fn list_stores(peers: &PathBuf) -> anyhow::Result<Vec<String>> {
    let output = Command::new(peers).arg("stores").output();
    let output = output.with_context(|| {
        format!("{}, which make lab and make install-lab build", peers.display())
    })?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(String::from).collect())
}

impl Subject for KeyValue {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn describe(&self) -> String {
        match self.name.as_str() {
            "leveldb" => "LevelDB, the C++ library of this system",
            "rocksdb" => "RocksDB, the C++ library of this system",
            "lmdb" => "LMDB: a transaction for each put",
            "redb" => "redb: a transaction for each put",
            "draconis-kv" => "Draconis: keys in an object store, in a file with direct I/O",
            "fjall" => "fjall: a log-structured merge tree",
            "slatedb" => "SlateDB: a log-structured merge tree of objects in a bucket",
            _ => "a store",
        }
        .into()
    }

    fn kind(&self) -> SubjectKind {
        SubjectKind::KeyValue
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    fn files(&self) -> anyhow::Result<Arc<dyn SubjectFiles>> {
        bail!("a store has no files")
    }
}
