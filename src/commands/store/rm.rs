//! `draconis store rm`

use std::path::PathBuf;

use clap::Args;
use draconis_objects::{Error, Group, ObjectId};

use super::number;
use super::opened::{close, tell, writable};

/// Remove objects, all at once.
#[derive(Debug, Args)]
pub struct Arguments {
    /// What is not there is no error.
    #[arg(short, long)]
    force: bool,
    /// The file or block device.
    device: PathBuf,
    /// The numbers of the objects.
    #[arg(value_name = "OBJECT", required = true, value_parser = number)]
    objects: Vec<u64>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let device = &arguments.device;
    let store = writable(device)?;
    let mut objects = arguments.objects.clone();
    objects.sort_unstable();
    objects.dedup();
    let mut group = Group::new();
    for id in objects.into_iter().map(ObjectId) {
        match store.len(id) {
            Ok(_) => group.delete(id),
            Err(Error::NoObject(_)) if arguments.force => {}
            Err(error) => return Err(tell(device, error)),
        }
    }
    store.submit(group, &[]).map_err(|refused| tell(device, refused.error))?;
    close(&store, device)
}
