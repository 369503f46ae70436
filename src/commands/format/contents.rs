//! Contents of a new volume, from the command line.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::Context;
use draconis_access::populate::{
    self, DerivedFields, DeviceTable, ExcludePatterns, FillOptions, ScanResult,
};
use draconis_ext::mkfs::FormatOptions;
use draconis_types::path_bytes::ShowPath;

use super::Arguments;
use crate::report;

/// Maximum length of a file list and of a device table, in bytes.
const MAX_LIST_BYTES: u64 = 256 << 20;

/// Scans the sources; returns their tree, and the configuration of an image.
pub fn scan_sources(
    arguments: &Arguments,
    options: &mut FormatOptions,
) -> anyhow::Result<ScanResult> {
    let epoch = std::env::var_os("SOURCE_DATE_EPOCH").is_some();
    let table = arguments.devices.as_deref().map(read_device_table).transpose()?;
    let list = arguments.list.as_deref().map(read_path_list).transpose()?;
    let reproducible = arguments.reproducible.then(|| DerivedFields {
        time: !epoch,
        uuid: matches!(&arguments.uuid[..], "random" | "time"),
        hash_seed: !arguments.extended.iter().any(|list| list.contains("hash_seed")),
    });
    let filling = FillOptions {
        from: &arguments.from,
        list: list.as_deref(),
        exclude: &ExcludePatterns::new(arguments.reading.exclude_patterns()),
        image_options: arguments.reading.image_options(&arguments.image),
        owner: arguments.owner.map(|owner| (owner.uid, owner.gid)),
        squash: arguments.squash,
        squash_perms: arguments.squash_perms,
        table: table.as_ref().zip(arguments.devices.as_deref()),
        clamp_times: epoch,
        reproducible,
    };
    let found = populate::scan_sources_and_derive(filling, options)?;
    arguments.reading.check_config(found.config.as_deref())?;
    report::print_notes(&found.source.notes);
    Ok(found)
}

/// Reads the names in a list.
fn read_path_list(path: &Path) -> anyhow::Result<Vec<Vec<u8>>> {
    let text = read(path)?;
    let end = if text.contains(&0) { 0 } else { b'\n' };
    let names = text.split(|byte| *byte == end).filter(|name| !name.is_empty());
    Ok(names.map(<[u8]>::to_vec).collect())
}

fn read_device_table(path: &Path) -> anyhow::Result<DeviceTable> {
    DeviceTable::parse(&read(path)?).with_context(|| path.shown().to_string())
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut all = vec![];
    let read = match path == Path::new("-") {
        true => std::io::stdin().lock().take(MAX_LIST_BYTES).read_to_end(&mut all),
        false => File::open(path).and_then(|file| file.take(MAX_LIST_BYTES).read_to_end(&mut all)),
    };
    read.with_context(|| path.shown().to_string())?;
    Ok(all)
}
