//! `draconis store put`

use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use draconis_objects::{Error, Group, LifetimeHint, ObjectId};
use draconis_types::path_bytes::ShowPath;

use super::ObjectArg;
use super::copy::{BATCH_BYTES, GROUP_BYTES, ObjectInput, read_up_to, write};
use super::open::{StoreWriteArgs, close_store, open_writable, with_context};
use crate::image::store_disk;
use crate::progress::{ByteProgress, ProgressMode};
use crate::report;

/// Store a file as a new object, or replace an object.
///
/// Objects up to 64 MiB are replaced atomically, larger ones in pieces. Zeros use no space. A raw
/// image stored under a name is a disk.
#[derive(Debug, Args)]
pub struct Arguments {
    /// How the store is written.
    #[command(flatten)]
    write: StoreWriteArgs,
    /// Expected lifetime: hot (rewritten soon) or cold.
    #[arg(long, value_enum)]
    hint: Option<HintArg>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
    /// Object number, disk name, or "new" (prints the number).
    #[arg(value_name = "OBJECT|NAME|new")]
    object: ObjectDestArg,
    /// Input file (default: standard input).
    file: Option<PathBuf>,
}

/// Expected lifetime of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum HintArg {
    /// Rewritten soon.
    Hot,
    /// Kept.
    Cold,
}

/// Destination of an object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ObjectDestArg {
    /// A new object.
    New,
    /// An existing object.
    Number(u64),
    /// A disk, existing or new.
    Name(String),
}

impl std::str::FromStr for ObjectDestArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "new" => Ok(Self::New),
            _ => Ok(match text.parse()? {
                ObjectArg::Number(number) => Self::Number(number),
                ObjectArg::Name(name) => Self::Name(store_disk::parse_disk_name(&name)?),
            }),
        }
    }
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    let mut from = ObjectInput::open(arguments.file.as_deref(), device)?;
    let store = open_writable(device, arguments.write.force)?;
    let say = |error| with_context(device, error);
    let mut progress = ByteProgress::new(arguments.progress, from.len_bytes());
    let mut bytes = read_up_to(&mut from, GROUP_BYTES, &mut progress)?;
    let mut group = Group::new();
    let there = match &arguments.object {
        ObjectDestArg::New => None,
        ObjectDestArg::Number(number) => Some(ObjectId(*number)),
        ObjectDestArg::Name(name) => store.find_named_object(name.as_bytes()).map_err(say)?,
    };
    let is_new = there.is_none();
    let id = match there {
        None => {
            let hint = match arguments.hint {
                None => LifetimeHint::Unknown,
                Some(HintArg::Hot) => LifetimeHint::Hot,
                Some(HintArg::Cold) => LifetimeHint::Cold,
            };
            group.create(store.new_object(), hint)
        }
        Some(id) => {
            store.len(id).map_err(|error| match error {
                Error::NoObject(id) => {
                    anyhow!("{}: there is no object {id}; put new makes one", device.shown())
                }
                error => say(error),
            })?;
            group.truncate(id, 0);
            id
        }
    };
    let (mut at, mut most) = (0, GROUP_BYTES);
    loop {
        write(&mut group, id, at, &bytes);
        at += bytes.len() as u64;
        let is_last = bytes.len() < most;
        if let (true, true, ObjectDestArg::Name(name)) = (is_last, is_new, &arguments.object) {
            group.set_name(name.as_bytes(), id);
        }
        if let Err(refused) = store.submit(std::mem::take(&mut group), &[]) {
            if is_new && most == BATCH_BYTES {
                // Deletes the incomplete object.
                let mut group = Group::new();
                group.delete(id);
                store.submit(group, &[]).map_err(|refused| say(refused.error))?;
                close_store(&store, device)?;
            }
            return Err(say(refused.error));
        }
        if is_last {
            break;
        }
        most = BATCH_BYTES;
        bytes = read_up_to(&mut from, most, &mut progress)?;
    }
    close_store(&store, device)?;
    if arguments.object == ObjectDestArg::New {
        report::print_line(id)?;
    }
    from.check_unchanged()
}
