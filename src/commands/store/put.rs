//! `draconis store put`

use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use draconis_objects::{Error, Group, Hint, ObjectId};

use super::Object;
use super::opened::{close, tell, writable};
use super::stream::{GROUP_BYTES, Input, LOT_BYTES, take, write};
use crate::image::object;
use crate::progress::{Progress, When};
use crate::say;

/// Store a file as a new object, or replace an object.
///
/// Objects up to 64 MiB are replaced atomically, larger ones in pieces. Zeros use no space. A raw
/// image stored under a name is a disk.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Expected lifetime: hot (rewritten soon) or cold.
    #[arg(long, value_enum)]
    hint: Option<Heat>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// Store: file, block device or bucket (s3://BUCKET/PREFIX).
    device: PathBuf,
    /// Object number, disk name, or "new" (prints the number).
    #[arg(value_name = "OBJECT|NAME|new")]
    object: ObjectName,
    /// Input file (default: standard input).
    file: Option<PathBuf>,
}

/// What is known of an object's future, as `--hint` spells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Heat {
    /// Rewritten soon.
    Hot,
    /// Kept.
    Cold,
}

/// An object on the command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ObjectName {
    /// One that is to be made.
    New,
    /// One that is there.
    Number(u64),
    /// A disk, there or not.
    Name(String),
}

impl std::str::FromStr for ObjectName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "new" => Ok(Self::New),
            _ => Ok(match text.parse()? {
                Object::Number(number) => Self::Number(number),
                Object::Name(name) => Self::Name(object::disk_name(&name)?),
            }),
        }
    }
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    let mut from = Input::open(arguments.file.as_deref(), device)?;
    let store = writable(device)?;
    let say = |error| tell(device, error);
    let mut progress = Progress::new(arguments.progress, from.len_bytes());
    let mut bytes = take(&mut from, GROUP_BYTES, &mut progress)?;
    let mut group = Group::new();
    let there = match &arguments.object {
        ObjectName::New => None,
        ObjectName::Number(number) => Some(ObjectId(*number)),
        ObjectName::Name(name) => store.named(name.as_bytes()).map_err(say)?,
    };
    let is_new = there.is_none();
    let id = match there {
        None => {
            let hint = match arguments.hint {
                None => Hint::Unknown,
                Some(Heat::Hot) => Hint::Hot,
                Some(Heat::Cold) => Hint::Cold,
            };
            group.create(store.new_object(), hint)
        }
        Some(id) => {
            store.len(id).map_err(|error| match error {
                Error::NoObject(id) => {
                    anyhow!("{}: there is no object {id}; put new makes one", device.display())
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
        if let (true, true, ObjectName::Name(name)) = (is_last, is_new, &arguments.object) {
            group.name(name.as_bytes(), id);
        }
        if let Err(refused) = store.submit(std::mem::take(&mut group), &[]) {
            if is_new && most == LOT_BYTES {
                // Half an object is of no use.
                let mut group = Group::new();
                group.delete(id);
                store.submit(group, &[]).map_err(|refused| say(refused.error))?;
                close(&store, device)?;
            }
            return Err(say(refused.error));
        }
        if is_last {
            break;
        }
        most = LOT_BYTES;
        bytes = take(&mut from, most, &mut progress)?;
    }
    close(&store, device)?;
    if arguments.object == ObjectName::New {
        say::print_line(id)?;
    }
    from.is_unchanged()
}
