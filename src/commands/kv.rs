//! `draconis kv`: keys and values in a store.

mod del;
mod form;
mod get;
mod load;
mod put;
mod scan;
mod stats;

use std::path::Path;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use draconis_objects::kv::{Batch, Kv};

use crate::commands::store::open::with_context;

/// Read and write keys in a store.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// What to do with keys.
#[derive(Debug, Subcommand)]
pub enum Command {
    Put(put::Arguments),
    Get(get::Arguments),
    Del(del::Arguments),
    Scan(scan::Arguments),
    Stats(stats::Arguments),
    Load(load::Arguments),
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        Command::Put(arguments) => put::run(arguments)?,
        Command::Get(arguments) => get::run(arguments)?,
        Command::Del(arguments) => del::run(arguments)?,
        Command::Scan(arguments) => scan::run(arguments)?,
        Command::Stats(arguments) => stats::run(arguments)?,
        Command::Load(arguments) => load::run(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Submits a batch of changes, without waiting until they are durable.
fn write(kv: &Kv, store: &Path, batch: Batch) -> anyhow::Result<()> {
    match kv.write(batch) {
        Ok(_) => Ok(()),
        Err(refused) => Err(with_context(store, refused.1)),
    }
}
