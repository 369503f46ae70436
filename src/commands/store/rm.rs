//! `draconis store rm`

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use draconis_objects::{Error, Group, ObjectId};
use draconis_service::store_process::DiskCommand;
use draconis_types::path_bytes::ShowPath;

use super::ObjectArg;
use super::open::{close_store, open_writable, with_context};
use super::snapshots::{self, StoreDiskArg};
use crate::image::{Force, parse_force};

/// Remove objects, disks or snapshots atomically.
///
/// Removes a disk's snapshots only with -r. A snapshot with several children cannot be removed.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Ignore missing objects. With raid-member, write also to a member of a RAID, which this splits from the
    /// others.
    #[arg(short, long, value_name = "KIND", num_args = 0..=1, require_equals = true,
        default_missing_value = "", value_parser = parse_force)]
    force: Vec<Option<Force>>,
    /// Remove disks with their snapshots.
    #[arg(short, long)]
    recursive: bool,
    /// Store, or a disk or snapshot, as STORE#NAME or STORE#NAME@SNAPSHOT.
    #[arg(value_name = "STORE")]
    device: PathBuf,
    /// Object numbers, or names of disks and snapshots.
    #[arg(value_name = "OBJECT")]
    objects: Vec<ObjectArg>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { device, objects, .. } = arguments;
    if !objects.is_empty() {
        return remove_objects(arguments, device, objects);
    }
    match StoreDiskArg::parse(device.as_os_str()) {
        Ok(one) if !device.exists() => {
            remove_objects(arguments, &one.store, &[ObjectArg::Name(one.name())])
        }
        _ => bail!("{}: say which objects; draconis store ls lists them", device.shown()),
    }
}

fn remove_objects(
    arguments: &Arguments,
    device: &Path,
    objects: &[ObjectArg],
) -> anyhow::Result<()> {
    let is_forced = arguments.force.contains(&None);
    let force = arguments.force.iter().flatten().copied().next();
    // Other disks of the store may be mounted, so its process removes the disk.
    if let [ObjectArg::Name(name)] = objects {
        let change =
            DiskCommand::Remove { name: name.clone(), with_snapshots: arguments.recursive };
        let done = snapshots::run_disk_command(device, &change, force);
        let is_missing = |error: &anyhow::Error| {
            let text = error.to_string();
            text.contains(" has no disk ") || text.contains(" has no snapshot ")
        };
        return match done {
            Err(error) if is_forced && is_missing(&error) => Ok(()),
            done => done,
        };
    }
    let store = open_writable(device, force)?;
    let mut ids: Vec<ObjectId> = vec![];
    for object in objects {
        match object.find_object(&store, device) {
            Ok(id) => ids.push(id),
            Err(_) if is_forced && matches!(object, ObjectArg::Name(_)) => {}
            Err(error) => return Err(error),
        }
    }
    ids.sort_unstable();
    ids.dedup();
    let say = |error| with_context(device, error);
    let disks = store.list_disks().map_err(say)?;
    let mut group = Group::new();
    for id in ids {
        let names = disks.iter().filter(|disk| disk.id == id);
        let names: Vec<&[u8]> = names.map(|disk| disk.name.as_slice()).collect();
        let is_of_others =
            disks.iter().any(|disk| disk.parent.as_deref() == names.first().copied());
        let has_snapshots = |name: &&[u8]| {
            name.contains(&b'@')
                || disks.iter().any(|disk| {
                    disk.name.strip_prefix(*name).is_some_and(|rest| rest.starts_with(b"@"))
                })
        };
        if let Some(name) =
            names.iter().find(|name| is_of_others && !names.is_empty() || has_snapshots(name))
        {
            store.remove_disk(name, arguments.recursive).map_err(say)?;
            continue;
        }
        match store.len(id) {
            Ok(_) => {
                names.iter().for_each(|name| group.remove_name(name));
                group.delete(id);
            }
            Err(Error::NoObject(_)) if is_forced => {}
            Err(error) => return Err(say(error)),
        }
    }
    store.submit(group, &[]).map_err(|refused| say(refused.error))?;
    close_store(&store, device)
}
