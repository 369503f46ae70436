//! SlateDB: a log-structured merge tree (LSM tree) with its tables as objects in a bucket.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use slatedb::config::Settings;
use slatedb::db_cache::moka::{MokaCache, MokaCacheOptions};
use slatedb::{Db, WriteBatch};
use tokio::runtime::{Builder, Runtime};

use crate::kv::{KvSubject, ScanCallback, StoreOptions, StoreStatistics};

/// Flush interval of puts, the same as ours.
const FLUSH: Duration = Duration::from_millis(50);

/// Default cache for reads, in bytes.
const CACHE_BYTES: u64 = 256 << 20;

/// An open store.
pub struct Slate {
    runtime: Runtime,
    db: Db,
    durable: bool,
}

impl Slate {
    /// Opens the store on local files in `dir`.
    ///
    /// # Errors
    /// SlateDB fails.
    pub fn open(dir: &Path, how: StoreOptions) -> anyhow::Result<Self> {
        Self::over(Arc::new(LocalFileSystem::new_with_prefix(dir)?), "store", how)
    }

    /// Opens the store in `prefix` of an S3 bucket, with settings from the environment.
    ///
    /// # Errors
    /// SlateDB fails.
    pub fn in_bucket(bucket: &str, prefix: &str, how: StoreOptions) -> anyhow::Result<Self> {
        // TLS needs a default crypto provider; installing it fails if there is one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_allow_http(true);
        Self::over(Arc::new(builder.build()?), prefix, how)
    }

    fn over(
        objects: Arc<dyn ObjectStore>,
        prefix: &str,
        how: StoreOptions,
    ) -> anyhow::Result<Self> {
        let runtime = Builder::new_multi_thread().enable_all().build()?;
        let memory = how.cache_bytes.unwrap_or(CACHE_BYTES);
        let unwritten = memory / 4;
        let defaults = Settings::default();
        let settings = Settings {
            flush_interval: Some(FLUSH),
            max_unflushed_bytes: unwritten as usize,
            // A quarter, because one memtable is filled while others are flushed.
            l0_sst_size_bytes: defaults.l0_sst_size_bytes.min(unwritten as usize / 4),
            ..defaults
        };
        let max_capacity = memory - unwritten;
        let options = MokaCacheOptions { max_capacity, ..MokaCacheOptions::default() };
        let cache = Arc::new(MokaCache::new_with_opts(options));
        let builder = Db::builder(prefix, objects).with_settings(settings).with_db_cache(cache, 0);
        let db = runtime.block_on(builder.build())?;
        Ok(Self { runtime, db, durable: how.durable })
    }
}

impl Drop for Slate {
    fn drop(&mut self) {
        if let Err(error) = self.runtime.block_on(self.db.close()) {
            eprintln!("SlateDB was not closed: {error}");
        }
    }
}

impl KvSubject for Slate {
    fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
        self.runtime.block_on(async {
            let written = self.db.put(key, value).await?;
            if self.durable {
                written.await_durable().await?;
            }
            Ok(())
        })
    }

    fn load(&self, pairs: &[(Vec<u8>, Vec<u8>)]) -> anyhow::Result<()> {
        let mut batch = WriteBatch::new();
        pairs.iter().for_each(|(key, value)| batch.put(key, value));
        self.runtime.block_on(self.db.write(batch))?;
        Ok(())
    }

    fn get(&self, key: &[u8]) -> anyhow::Result<Option<Vec<u8>>> {
        Ok(self.runtime.block_on(self.db.get(key))?.map(|value| value.to_vec()))
    }

    fn scan(&self, visit: ScanCallback<'_>) -> anyhow::Result<()> {
        self.runtime.block_on(async {
            let mut pairs = self.db.scan::<std::ops::RangeFull>(..).await?;
            while let Some(pair) = pairs.next().await? {
                if !visit(&pair.key, &pair.value) {
                    break;
                }
            }
            Ok(())
        })
    }

    fn delete(&self, key: &[u8]) -> anyhow::Result<()> {
        self.runtime.block_on(async {
            let written = self.db.delete(key).await?;
            if self.durable {
                written.await_durable().await?;
            }
            Ok(())
        })
    }

    fn sync(&self) -> anyhow::Result<()> {
        Ok(self.runtime.block_on(self.db.flush())?)
    }

    fn statistics(&self) -> anyhow::Result<StoreStatistics> {
        Ok(StoreStatistics::default())
    }
}
