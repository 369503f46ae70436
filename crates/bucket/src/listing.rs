//! Listing of folders in a bucket.

use std::collections::BTreeMap;

use draconis_device::Error;

use crate::api::ListEntry;
use crate::name::ObjectName;
use crate::retry::RetryingStore;

/// Returns the valid names in a folder, with the length of each object.
pub(crate) fn list_objects(
    bucket: &RetryingStore,
    folder: &str,
) -> Result<BTreeMap<ObjectName, u64>, Error> {
    let all = bucket.list(folder).map_err(|trouble| bucket.error("listing", folder, &trouble))?;
    let ours = all.into_iter().filter_map(|ListEntry { key, len_bytes }| {
        ObjectName::parse(&key).map(|name| (name, len_bytes))
    });
    Ok(ours.collect())
}
