//! `draconis disk-process`: what a command starts that looks at a volume in a bucket.

use std::process::ExitCode;

use clap::Args;
use draconis_service::elsewhere;

use crate::bucket::Buckets;

/// Have a disk in a bucket for a confined process: started by that, never by hand.
#[derive(Debug, Args)]
pub struct Arguments {}

pub fn run() -> anyhow::Result<ExitCode> {
    elsewhere::run(&Buckets).map_err(anyhow::Error::msg)?;
    Ok(ExitCode::SUCCESS)
}
