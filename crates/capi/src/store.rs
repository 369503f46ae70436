//! An open store and its objects.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::Arc;

use draconis_access::overwrite::OverwritePermission;
use draconis_access::{Error, NewStore, Result, Store};
use draconis_objects::{Group, LayoutKind, LifetimeHint, ObjectId, Ticket};
use draconis_types::path_bytes::ShowPath;
use rustix::io::Errno;

use crate::error::{require, run, run_returning_count, run_with_output};
use crate::place::host_path;
use crate::raw::{Bytes, CStrArg, OutBuffer, null_error};
use crate::volume::DRACONIS_WRITE;

/// Layout chosen by measuring, if the store is large enough for that.
pub const DRACONIS_LAYOUT_MEASURED: u32 = 0;
/// Layout for hard disks.
pub const DRACONIS_LAYOUT_LOG: u32 = 1;
/// Layout for flash.
pub const DRACONIS_LAYOUT_COW: u32 = 2;

/// An open store. Can be used by any number of threads together.
pub struct draconis_store(pub(crate) Arc<Store>);

/// A group of changes, applied atomically. For one thread at a time.
pub struct draconis_group(Group);

/// A list of the objects as of its creation. For one thread at a time.
pub struct draconis_object_list(std::vec::IntoIter<(ObjectId, u64)>);

/// Options for a new store.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct draconis_store_options {
    /// Length in bytes; 0: that of the file or device.
    pub size_bytes: u64,
    /// One of DRACONIS_LAYOUT_*.
    pub layout: u32,
    /// Not 0: create the file as one hole instead of writing zeros.
    pub sparse: c_int,
    /// Not 0: overwrite an existing store or ext volume. Other recognised contents are never
    /// overwritten.
    pub force: c_int,
}

/// Result of checking a store.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct draconis_store_report {
    /// Not 0: no damage was found.
    pub clean: c_int,
    /// Not 0: everything could be checked.
    pub complete: c_int,
    /// Number of damaged places.
    pub damage: u64,
    /// Number of objects.
    pub objects: u64,
    /// Number of keys.
    pub keys: u64,
}

/// Creates an empty store, and the file if it is missing.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_store_create(
    store: CStrArg,
    options: Option<&draconis_store_options>,
) -> c_int {
    run(|| {
        let options = options.ok_or_else(|| null_error("options"))?;
        let layout = match options.layout {
            DRACONIS_LAYOUT_MEASURED => None,
            DRACONIS_LAYOUT_LOG => Some(LayoutKind::Log),
            DRACONIS_LAYOUT_COW => Some(LayoutKind::Cow),
            other => {
                return Err(Error::new(Errno::INVAL, format!("there is no layout {other}")));
            }
        };
        let new = NewStore {
            len_bytes: (options.size_bytes > 0).then_some(options.size_bytes),
            layout,
            sparse: options.sparse != 0,
            force: OverwritePermission::from_force_flag(options.force != 0),
        };
        Store::create(host_path(store, "store")?, &new)
    })
}

/// Opens a store. flags: 0 or DRACONIS_WRITE. draconis_store_close frees it.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_store_open(
    path: CStrArg,
    flags: u32,
    store: Option<&mut MaybeUninit<Option<Box<draconis_store>>>>,
) -> c_int {
    run_with_output(store, None, || {
        let path = host_path(path, "path")?;
        let opened = match flags {
            0 => Store::open(path),
            DRACONIS_WRITE => Store::open_for_writing(path),
            _ => Err(Error::new(Errno::INVAL, format!("flags {flags:#x} mean nothing here"))),
        };
        Ok(Some(Box::new(draconis_store(opened?))))
    })
}

/// Makes all changes durable, writes a checkpoint, releases the file and frees store even on
/// failure. Accepts NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_store_close(store: Option<Box<draconis_store>>) -> c_int {
    run(|| store.map_or(Ok(()), |store| store.0.close()))
}

/// Checks every checksum, map and count, without changing anything. Damage is reported in report,
/// not as an error.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_store_check(
    store: CStrArg,
    report: Option<&mut MaybeUninit<draconis_store_report>>,
) -> c_int {
    run_with_output(report, draconis_store_report::default(), || {
        let found = Store::check(host_path(store, "store")?)?;
        Ok(draconis_store_report {
            clean: found.is_clean().into(),
            complete: found.is_complete.into(),
            damage: (found.damage.len() as u64).saturating_add(found.more),
            objects: found.objects,
            keys: found.keys,
        })
    })
}

/// Creates an empty group; never NULL. draconis_group_free or draconis_store_submit frees it.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_group_new() -> Box<draconis_group> {
    Box::new(draconis_group(Group::new()))
}

/// Frees a group without submitting it. Accepts NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_group_free(group: Option<Box<draconis_group>>) {
    drop(group);
}

fn change(
    group: Option<&mut draconis_group>,
    work: impl FnOnce(&mut Group) -> Result<()>,
) -> c_int {
    run(|| work(&mut group.ok_or_else(|| null_error("group"))?.0))
}

/// Adds creating an empty object, and stores its number in id.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_group_create(
    group: Option<&mut draconis_group>,
    store: Option<&draconis_store>,
    id: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    run_with_output(id, 0, || {
        let group = group.ok_or_else(|| null_error("group"))?;
        Ok(group.0.create(require(store, "store")?.0.new_object()?, LifetimeHint::Unknown).0)
    })
}

/// Adds writing bytes at offset at of an object.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_group_write(
    group: Option<&mut draconis_group>,
    id: u64,
    at: u64,
    bytes: Bytes,
    len: usize,
) -> c_int {
    change(group, |group| {
        group.write(ObjectId(id), at, bytes.get(len, "bytes")?);
        Ok(())
    })
}

/// Adds appending bytes to an object.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_group_append(
    group: Option<&mut draconis_group>,
    id: u64,
    bytes: Bytes,
    len: usize,
) -> c_int {
    change(group, |group| {
        group.append(ObjectId(id), bytes.get(len, "bytes")?);
        Ok(())
    })
}

/// Adds setting the length of an object; new bytes read as zeros.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_group_truncate(
    group: Option<&mut draconis_group>,
    id: u64,
    size_bytes: u64,
) -> c_int {
    change(group, |group| {
        group.truncate(ObjectId(id), size_bytes);
        Ok(())
    })
}

/// Adds deleting an object.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_group_delete(group: Option<&mut draconis_group>, id: u64) -> c_int {
    change(group, |group| {
        group.delete(ObjectId(id));
        Ok(())
    })
}

/// Adds giving an object a name of 1 to 255 bytes, which may have named another object.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_group_name(
    group: Option<&mut draconis_group>,
    name: Bytes,
    len: usize,
    id: u64,
) -> c_int {
    change(group, |group| {
        group.set_name(name.get(len, "name")?, ObjectId(id));
        Ok(())
    })
}

/// Adds removing a name; the object remains.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_group_unname(
    group: Option<&mut draconis_group>,
    name: Bytes,
    len: usize,
) -> c_int {
    change(group, |group| {
        group.remove_name(name.get(len, "name")?);
        Ok(())
    })
}

/// Applies a group atomically, after everything submitted before, and frees group even on failure.
/// The changes are durable once draconis_store_wait has returned for the ticket. ticket may be
/// NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_store_submit(
    store: Option<&draconis_store>,
    group: Option<Box<draconis_group>>,
    ticket: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    submit_with_ticket(ticket, || {
        let group = group.ok_or_else(|| null_error("group"))?;
        require(store, "store")?.0.submit(group.0)
    })
}

/// Submits, and stores the ticket if `ticket` is not NULL.
pub(crate) fn submit_with_ticket(
    ticket: Option<&mut MaybeUninit<u64>>,
    submit: impl FnOnce() -> Result<Ticket>,
) -> c_int {
    let mut unwanted = MaybeUninit::uninit();
    run_with_output(Some(ticket.unwrap_or(&mut unwanted)), 0, || Ok(submit()?.0))
}

/// Waits until the group with this ticket and everything before it is durable.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_store_wait(store: Option<&draconis_store>, ticket: u64) -> c_int {
    run(|| require(store, "store")?.0.wait(Ticket(ticket)))
}

/// Makes all submitted changes durable.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_store_sync(store: Option<&draconis_store>) -> c_int {
    run(|| require(store, "store")?.0.sync())
}

/// Reads up to len bytes of an object from offset at. Returns the number of bytes read, or a
/// negative errno: ENOENT if the object does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_object_read(
    store: Option<&draconis_store>,
    id: u64,
    at: u64,
    buffer: OutBuffer,
    len: usize,
) -> i64 {
    run_returning_count(|| {
        let store = require(store, "store")?;
        Ok(store.0.read(ObjectId(id), at, buffer.get(len, "the buffer")?)? as u64)
    })
}

/// Returns the length of an object, or a negative errno.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_object_size(store: Option<&draconis_store>, id: u64) -> i64 {
    run_returning_count(|| require(store, "store")?.0.len(ObjectId(id)))
}

/// Gets the number of the object with a name; ENOENT if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_object_named(
    store: Option<&draconis_store>,
    name: Bytes,
    len: usize,
    id: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    run_with_output(id, 0, || {
        let store = require(store, "store")?;
        let name = name.get(len, "name")?;
        let text = || format!("{}: no object has this name", store.0.path().shown());
        store.0.find_name(name)?.map(|id| id.0).ok_or_else(|| Error::new(Errno::NOENT, text()))
    })
}

/// Lists the objects. draconis_object_list_close frees the list.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_object_list_open(
    store: Option<&draconis_store>,
    objects: Option<&mut MaybeUninit<Option<Box<draconis_object_list>>>>,
) -> c_int {
    run_with_output(objects, None, || {
        let all = require(store, "store")?.0.list()?;
        Ok(Some(Box::new(draconis_object_list(all.into_iter()))))
    })
}

/// Gets the next object, by number: returns 1, or 0 at the end. id and size_bytes may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_object_list_next(
    objects: Option<&mut draconis_object_list>,
    id: Option<&mut MaybeUninit<u64>>,
    size_bytes: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    let Some((ObjectId(next), size)) = objects.and_then(|objects| objects.0.next()) else {
        return 0;
    };
    id.map(|id| id.write(next));
    size_bytes.map(|size_bytes| size_bytes.write(size));
    1
}

/// Frees a list. Accepts NULL.
#[unsafe(no_mangle)]
pub extern "C" fn draconis_object_list_close(objects: Option<Box<draconis_object_list>>) {
    drop(objects);
}
