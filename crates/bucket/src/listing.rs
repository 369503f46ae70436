//! Listing of folders in a bucket.

use std::collections::BTreeMap;

use draconis_device::Error;

use crate::api::{ListEntry, RequestResult};
use crate::name::ObjectName;
use crate::retry::RetryingStore;

/// Returns the valid names in a folder, with the length of each object.
pub(crate) fn list_objects(
    bucket: &RetryingStore,
    folder: &str,
) -> Result<BTreeMap<ObjectName, u64>, Error> {
    parse_names(bucket, folder, bucket.list(folder))
}

/// Returns the valid names in a folder after a key, with the length of each object.
pub(crate) fn list_objects_after(
    bucket: &RetryingStore,
    folder: &str,
    after: &str,
) -> Result<BTreeMap<ObjectName, u64>, Error> {
    parse_names(bucket, folder, bucket.list_after(folder, after))
}

fn parse_names(
    bucket: &RetryingStore,
    folder: &str,
    listed: RequestResult<Vec<ListEntry>>,
) -> Result<BTreeMap<ObjectName, u64>, Error> {
    let all = listed.map_err(|trouble| bucket.error("listing", folder, &trouble))?;
    let ours = all.into_iter().filter_map(|ListEntry { key, len_bytes }| {
        ObjectName::parse(&key).map(|name| (name, len_bytes))
    });
    Ok(ours.collect())
}
