//! Listing of folders in a bucket.

use std::collections::BTreeMap;

use draconis_device::Error;

use crate::api::ListEntry;
use crate::name::Name;
use crate::retry::RetryingStore;

/// Returns the valid names in a folder, with the length of each object.
pub(crate) fn list(bucket: &RetryingStore, folder: &str) -> Result<BTreeMap<Name, u64>, Error> {
    let all = bucket.list(folder).map_err(|trouble| bucket.error("listing", folder, &trouble))?;
    let ours = all
        .into_iter()
        .filter_map(|ListEntry { key, len_bytes }| Name::of(&key).map(|name| (name, len_bytes)));
    Ok(ours.collect())
}
