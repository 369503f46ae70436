//! `draconis store rm`

use std::path::PathBuf;

use clap::Args;
use draconis_objects::{Error, Group, ObjectId};

use super::Object;
use super::opened::{close, tell, writable};

/// Remove objects, all at once.
#[derive(Debug, Args)]
pub struct Arguments {
    /// What is not there is no error.
    #[arg(short, long)]
    force: bool,
    /// The file or block device.
    device: PathBuf,
    /// The numbers of the objects, or the names of disks.
    #[arg(value_name = "OBJECT", required = true)]
    objects: Vec<Object>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    let store = writable(device)?;
    let mut objects: Vec<ObjectId> = vec![];
    for object in &arguments.objects {
        match object.find(&store, device) {
            Ok(id) => objects.push(id),
            Err(_) if arguments.force && matches!(object, Object::Name(_)) => {}
            Err(error) => return Err(error),
        }
    }
    objects.sort_unstable();
    objects.dedup();
    let mut group = Group::new();
    let names = store.names().map_err(|error| tell(device, error))?;
    for (name, _) in names.iter().filter(|(_, id)| objects.binary_search(id).is_ok()) {
        group.unname(name);
    }
    for id in objects {
        match store.len(id) {
            Ok(_) => group.delete(id),
            Err(Error::NoObject(_)) if arguments.force => {}
            Err(error) => return Err(tell(device, error)),
        }
    }
    store.submit(group, &[]).map_err(|refused| tell(device, refused.error))?;
    close(&store, device)
}
