//! `draconis store-process`: started by a store keeper.

use std::process::ExitCode;

use clap::Args;
use draconis_service::store_process;

/// Run a store's sandboxed process (started by the store keeper).
#[derive(Debug, Args)]
pub struct Arguments {
    /// Most private memory it may have, in bytes.
    #[arg(long)]
    memory: Option<u64>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    store_process::run_store_process(arguments.memory).map_err(anyhow::Error::msg)?;
    Ok(ExitCode::SUCCESS)
}
