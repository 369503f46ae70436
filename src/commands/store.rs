//! `draconis store`: objects in a file, on a device or in a bucket.
//!
//! ```text
//!   writers ──alone──▶ disk ─▶ store        readers ──shared──▶ disk ─▶ store, read-only
//! ```
//!
//! Law 1: what is in use, and what holds something unless forced, is not touched.
//! Law 2: a block device is measured, or made a store, only by who says --destroy;
//! everywhere else what is measured is a file of our own.
//! Law 3: a file that was written out stays so: nothing of it is discarded, since each hole
//! that is written to again costs a commit of the file system's journal.

mod append;
pub mod bucket;
mod check;
mod create;
mod get;
mod grow;
mod info;
mod ls;
pub mod opened;
mod probe;
mod profile;
mod put;
mod rm;
mod salvage;
mod shrink;
pub mod stream;

use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Keep objects in a store: a file, block device or bucket, laid out for what is below.
///
/// A bucket is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY.
/// Credentials and endpoints come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
/// AWS_REGION, AWS_ENDPOINT_URL and so on. Who changes a store in a bucket takes it over from who
/// did before; readers disturb none.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    bucket: bucket::Options,
    #[command(subcommand)]
    command: Command,
}

/// What to do with a store.
#[derive(Debug, Subcommand)]
pub enum Command {
    Probe(probe::Arguments),
    Create(create::Arguments),
    Info(info::Arguments),
    Check(check::Arguments),
    Ls(ls::Arguments),
    Put(put::Arguments),
    Get(get::Arguments),
    Append(append::Arguments),
    Rm(rm::Arguments),
    Grow(grow::Arguments),
    Shrink(shrink::Arguments),
    Salvage(salvage::Arguments),
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    bucket::begin(&arguments.bucket);
    let done = run_command(&arguments.command);
    bucket::end();
    done
}

fn run_command(command: &Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Probe(arguments) => probe::run(arguments)?,
        Command::Create(arguments) => create::run(arguments)?,
        Command::Info(arguments) => info::run(arguments)?,
        Command::Check(arguments) => return Ok(check::run(arguments)),
        Command::Ls(arguments) => ls::run(arguments)?,
        Command::Put(arguments) => put::run(arguments)?,
        Command::Get(arguments) => get::run(arguments)?,
        Command::Append(arguments) => append::run(arguments)?,
        Command::Rm(arguments) => rm::run(arguments)?,
        Command::Grow(arguments) => grow::run(arguments)?,
        Command::Shrink(arguments) => shrink::run(arguments)?,
        Command::Salvage(arguments) => return salvage::run(arguments),
    }
    Ok(ExitCode::SUCCESS)
}

/// Parses the number of an object for clap.
fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "not a number; draconis store ls shows them".to_string())
}
