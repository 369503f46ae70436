//! `draconis disk-process`: serves a bucket to a command that reads a volume in it.

use std::process::ExitCode;

use clap::Args;
use draconis_service::remote_disk;

use crate::bucket::BucketProvider;

/// Serve a bucket to a sandboxed command (started by the command).
#[derive(Debug, Args)]
pub struct Arguments {}

pub fn run() -> anyhow::Result<ExitCode> {
    remote_disk::run_disk_process(&BucketProvider).map_err(anyhow::Error::msg)?;
    Ok(ExitCode::SUCCESS)
}
