//! `draconis store put`

use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use draconis_objects::{Error, Group, Hint, ObjectId};

use super::number;
use super::opened::{close, tell, writable};
use super::stream::{GROUP_BYTES, LOT_BYTES, source, take};
use crate::progress::{Progress, When};

/// Put a file into a store as an object, or in place of one.
///
/// Up to 64 MiB an object is replaced at once or not at all, whatever happens meanwhile;
/// what is longer is written piece by piece.
#[derive(Debug, Args)]
pub struct Arguments {
    /// What is known of its future: rewritten soon (hot) or kept (cold).
    #[arg(long, value_enum)]
    hint: Option<Heat>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = When::Auto)]
    progress: When,
    /// The file or block device.
    device: PathBuf,
    /// The number of the object to replace, or new: its number is printed.
    #[arg(value_name = "OBJECT|new")]
    object: ObjectName,
    /// What to put; standard input if left out or -.
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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectName {
    /// One that is to be made.
    New,
    /// One that is there.
    Number(u64),
}

impl std::str::FromStr for ObjectName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "new" => Ok(Self::New),
            _ => number(text).map(Self::Number).map_err(|_| "a number, or new".to_string()),
        }
    }
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    let (mut from, len) = source(arguments.file.as_deref())?;
    let store = writable(device)?;
    let say = |error| tell(device, error);
    let mut progress = Progress::new(arguments.progress, len);
    let mut bytes = take(&mut *from, GROUP_BYTES, &mut progress)?;
    let mut group = Group::new();
    let id = match arguments.object {
        ObjectName::New => {
            let hint = match arguments.hint {
                None => Hint::Unknown,
                Some(Heat::Hot) => Hint::Hot,
                Some(Heat::Cold) => Hint::Cold,
            };
            group.create(store.new_object(), hint)
        }
        ObjectName::Number(number) => {
            let id = ObjectId(number);
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
    let mut at = 0;
    loop {
        group.write(id, at, &bytes);
        at += bytes.len() as u64;
        if let Err(refused) = store.submit(std::mem::take(&mut group), &[]) {
            if arguments.object == ObjectName::New && at > bytes.len() as u64 {
                // Half an object is of no use.
                let mut group = Group::new();
                group.delete(id);
                store.submit(group, &[]).map_err(|refused| say(refused.error))?;
                close(&store, device)?;
            }
            return Err(say(refused.error));
        }
        if at < GROUP_BYTES as u64 {
            break;
        }
        bytes = take(&mut *from, LOT_BYTES, &mut progress)?;
        if bytes.is_empty() {
            break;
        }
    }
    close(&store, device)?;
    if arguments.object == ObjectName::New {
        println!("{id}");
    }
    Ok(())
}
