//! `draconis store`: object stores in files, on devices or in buckets.
//!
//! ```text
//!   writers ──exclusive──▶ disk ─▶ store        readers ──shared──▶ disk ─▶ store, read-only
//!                                                followers ───no lock───▶ disk ─▶ store, read-only
//! ```
//!
//! Law 1: targets in use, and existing contents unless forced, are not touched.
//! Law 2: a block device is measured or becomes a store only with --destroy; otherwise a
//! temporary file is measured.
//! Law 3: a zero-filled store file is never hole-punched, because each later write to a hole would
//! cost a journal commit of the file system.

mod append;
mod check;
mod clone;
pub mod copy;
mod create;
mod disk;
pub mod follow;
mod get;
mod grow;
mod info;
mod ls;
pub mod open;
mod probe;
mod profile;
mod put;
mod rm;
mod rollback;
mod salvage;
mod shrink;
mod snapshot;
mod snapshots;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use draconis_objects::{ObjectId, Store};
use draconis_types::path_bytes::ShowPath;

use crate::image::store_disk;

/// Manage object stores in files, block devices and buckets.
///
/// A bucket is s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY.
/// Credentials, region and endpoint of S3 come from the same sources as for the aws command:
/// environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL), web
/// identity, the profile AWS_PROFILE in ~/.aws/credentials and ~/.aws/config, the role of a container
/// or instance. Other clouds use the environment variables of their own tools.
///
/// A writer fences off the previous writer of a bucket. Mounts are fenced off only with --take-over.
/// Readers do not disturb writers. See --journal for local durability.
#[derive(Debug, Args)]
pub struct Arguments {
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
    Disk(disk::Arguments),
    Snapshot(snapshot::Arguments),
    Clone(clone::Arguments),
    Rollback(rollback::Arguments),
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
    match &arguments.command {
        Command::Probe(arguments) => probe::run(arguments)?,
        Command::Create(arguments) => create::run(arguments)?,
        Command::Info(arguments) => info::run(arguments)?,
        Command::Check(arguments) => return Ok(check::run(arguments)),
        Command::Disk(arguments) => disk::run(arguments)?,
        Command::Snapshot(arguments) => snapshot::run(arguments)?,
        Command::Clone(arguments) => clone::run(arguments)?,
        Command::Rollback(arguments) => rollback::run(arguments)?,
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

/// An object argument: a number, or the name of a disk.
#[derive(Clone, PartialEq, Eq, Debug)]
enum ObjectArg {
    Number(u64),
    Name(String),
}

impl std::str::FromStr for ObjectArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(number) => Ok(Self::Number(number)),
            Err(_) => match text.split_once('@') {
                None => store_disk::parse_existing_disk_name(text).map(Self::Name),
                Some((disk, snapshot)) => {
                    store_disk::parse_existing_disk_name(disk)?;
                    store_disk::parse_existing_disk_name(snapshot)?;
                    Ok(Self::Name(text.to_owned()))
                }
            },
        }
    }
}

impl ObjectArg {
    /// Refuses a snapshot, which is read-only.
    fn check_writable(&self, device: &Path) -> anyhow::Result<()> {
        match self {
            Self::Name(name) if name.contains('@') => {
                let shown = format!("{}#{name}", device.shown());
                bail!("{shown} is a snapshot; draconis store clone {shown} NEW makes a disk of it")
            }
            _ => Ok(()),
        }
    }

    /// Returns the object with a name; a number is not looked up.
    fn find_object(&self, store: &Store, device: &Path) -> anyhow::Result<ObjectId> {
        let name = match self {
            Self::Number(number) => return Ok(ObjectId(*number)),
            Self::Name(name) => name,
        };
        let found = store
            .find_named_object(name.as_bytes())
            .map_err(|error| open::with_context(device, error))?;
        let shown = device.shown();
        found.with_context(|| {
            format!("{shown}: there is no disk {name}; draconis store ls {shown} lists them")
        })
    }
}
