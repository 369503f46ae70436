//! `draconis store-keeper`: started by a mount's keeper for a store with mounted disks.

use std::process::ExitCode;

use clap::Args;
use draconis_service::store_keeper;

use crate::bucket::BucketProvider;

/// Run a store's keeper (started by a mount's keeper).
#[derive(Debug, Args)]
pub struct Arguments {}

pub fn run() -> anyhow::Result<ExitCode> {
    store_keeper::run_store_keeper(&BucketProvider).map_err(anyhow::Error::msg)?;
    Ok(ExitCode::SUCCESS)
}
