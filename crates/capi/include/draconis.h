/* libdraconis: ext2, ext3 and ext4 volumes, and stores of objects and keys, in the caller's
 * process. Made by `make header`; changes belong into the sources.
 *
 * Failures. A function that returns int or int64_t returns a negative errno when it fails, else 0
 * or what it says; draconis_error_message() then says what it is about. Out pointers hold NULL or
 * zeros after a failure.
 *
 * Ownership. What comes from a *_open or *_new is given back to its *_close or *_free, once, in
 * any order; nothing is to be given to free(). Pointers that are lent say until when. Texts end
 * with NUL; paths in a volume are bytes, absolute or relative to its root.
 *
 * Threads. Volumes, files and stores may be used by any number of threads together, as long as
 * none closes what another uses. Other handles are for one thread at a time. Callbacks are called
 * in the thread of the call, and must return: no longjmp, no exception.
 *
 * Images are locked (flock): one who changes, or several who read. After fork() only one process
 * may use what was open before.
 *
 * The library reads bytes that may be hostile in the process that calls it. It believes none of
 * them, but it confines nothing: the program `draconis` does.
 */

#ifndef DRACONIS_H
#define DRACONIS_H

#include <stddef.h>
#include <stdint.h>

// Scan in descending order.
#define DRACONIS_REVERSE 1

// Layout chosen by measuring, if the store is large enough for that.
#define DRACONIS_LAYOUT_MEASURED 0

// Layout for hard disks.
#define DRACONIS_LAYOUT_LOG 1

// Layout for flash.
#define DRACONIS_LAYOUT_COW 2

// Open for writing, exclusively.
#define DRACONIS_WRITE 1

// Create the file if it is missing.
#define DRACONIS_CREATE 2

// Fail if it exists.
#define DRACONIS_EXCLUSIVE 4

// Truncate the file to length 0.
#define DRACONIS_TRUNCATE 8

// Do not follow a symbolic link.
#define DRACONIS_NOFOLLOW 16

// Fail if the new name exists.
#define DRACONIS_NOREPLACE 32

// Exchange the two names.
#define DRACONIS_EXCHANGE 64

// A batch of changes, applied atomically. For one thread at a time.
typedef struct draconis_batch draconis_batch;

// The contents of a directory when it was opened. For one thread at a time.
typedef struct draconis_dir draconis_dir;

// An open file, without a file position. Can be used by any number of threads together.
typedef struct draconis_file draconis_file;

// A group of changes, applied atomically. For one thread at a time.
typedef struct draconis_group draconis_group;

// A list of the objects as of its creation. For one thread at a time.
typedef struct draconis_object_list draconis_object_list;

// A scan of keys and values as of its start. For one thread at a time.
typedef struct draconis_scan draconis_scan;

// An open store. Can be used by any number of threads together.
typedef struct draconis_store draconis_store;

// The value of a key at the time of the call.
typedef struct draconis_value draconis_value;

// An open volume. Can be used by any number of threads together.
typedef struct draconis_volume draconis_volume;

// Bytes owned by the library.
typedef struct draconis_bytes {
    // First byte; not NULL.
    const void *bytes;
    // Number of bytes.
    size_t len;
} draconis_bytes;

// A string that ends with NUL, or NULL.
typedef const char *CStrArg;

// Options for a new volume. All zero except the size: ext4 with the defaults of mke2fs.
typedef struct draconis_format_options {
    // Length in bytes; 0: that of the image.
    uint64_t size_bytes;
    // "ext2", "ext3" or "ext4"; NULL: "ext4".
    CStrArg kind;
    // Label of at most 16 bytes; NULL: none.
    CStrArg label;
    // Features to set, or with ^ to clear, as mke2fs -O spells them; NULL: the defaults.
    CStrArg features;
    // Block size, 1024 to 65536; 0: depends on the size of the volume.
    uint32_t block_bytes;
    // Not 0: overwrite an existing ext volume. Other recognised contents are never
    // overwritten.
    int force;
} draconis_format_options;

// An array of strings, or NULL.
typedef const CStrArg *CStrArrayArg;

// Sources for filling a new volume. All zero: none, and nothing is excluded.
typedef struct draconis_fill_options {
    // A directory, or tar archives (plain, gzip, zstd, xz) and container images ("oci:DIR:TAG",
    // "oci-archive:FILE:TAG", "docker-archive:FILE:TAG"), each laid over those before.
    CStrArrayArg from;
    // Number of sources.
    size_t from_count;
    // Patterns of names to exclude, as for tar --exclude.
    CStrArrayArg exclude;
    // Number of patterns.
    size_t exclude_count;
    // Platform to choose from a multi-platform image, such as "linux/arm64"; NULL: this machine's.
    CStrArg platform;
    // "qcow2" or "vhdx": create a disk image that contains the volume; NULL: raw.
    CStrArg image_format;
    // Free space to add if the size is computed from the sources.
    uint64_t free_bytes;
    // Limit for the decompressed size of an archive; 0: 16 GiB plus 100 times its length.
    uint64_t limit_bytes;
    // Not 0: set the owner of all files to uid and gid.
    int give;
    // User ID for give.
    uint32_t uid;
    // Group ID for give.
    uint32_t gid;
    // Not 0: set the owner of all files to root, and clear group and other permissions.
    int squash;
    // Not 0: equal sources give equal bytes, on any machine and at any time.
    int reproducible;
    // Not 0: the smallest volume that holds the source, also on a longer device. Not with a size.
    int min;
    // Free space as a percentage of the volume, up to 95, instead of free_bytes.
    uint32_t free_percent;
    // Reserved for later versions; all zero.
    uint64_t later[7];
} draconis_fill_options;

// Callback for a problem; the text is valid during the call.
typedef void (*draconis_complaint_fn)(void *context, const char *complaint);

// Location of a volume in an image. All zero: the whole image, or the only partition that holds a
// volume.
typedef struct draconis_place {
    // Offset at which the volume begins.
    uint64_t offset_bytes;
    // Partition number, from 1.
    uint32_t partition;
    // Backing file of a disk image. Names stored in the image are not opened. May be
    // NULL.
    CStrArg backing;
} draconis_place;

// Changes of superblock settings. All zero: none.
typedef struct draconis_tune_options {
    // Label of at most 16 bytes, empty for none; NULL: unchanged.
    CStrArg label;
    // A UUID, "random" or "clear"; NULL: unchanged.
    CStrArg uuid;
    // Features to set, or with ^ to clear, as tune2fs -O spells them; NULL: unchanged.
    CStrArg features;
    // Reserved blocks: a number, or a percentage ("5%"); NULL: unchanged.
    CStrArg reserved;
    // Reaction of the kernel to errors: 1 continue, 2 remount read-only, 3 panic; 0: unchanged.
    uint16_t errors;
    // Maximum mount count before a check; -1: no limit; 0: unchanged.
    int32_t max_mounts;
    // Reserved for later versions; all zero.
    uint64_t later[8];
} draconis_tune_options;

// Result of a check.
typedef struct draconis_check_report {
    // Not 0: e2fsck -fn would report nothing.
    int clean;
    // Not 0: the check completed all passes.
    int complete;
    // Number of problems found, reported or not.
    uint64_t complaints;
    // Inodes in use.
    uint64_t used_inodes;
    // Inodes of the volume.
    uint64_t inodes;
    // Blocks in use.
    uint64_t used_blocks;
    // Blocks of the volume.
    uint64_t blocks;
} draconis_check_report;

// Callback that takes all the bytes of a piece of an archive; returns an errno, or 0.
typedef int (*draconis_write_fn)(void *context, const void *bytes, size_t len);

// Options for a new store.
typedef struct draconis_store_options {
    // Length in bytes; 0: that of the file or device.
    uint64_t size_bytes;
    // One of DRACONIS_LAYOUT_*.
    uint32_t layout;
    // Not 0: create the file as one hole instead of writing zeros.
    int sparse;
    // Not 0: overwrite an existing store or ext volume. Other recognised contents are never
    // overwritten.
    int force;
} draconis_store_options;

// Result of checking a store.
typedef struct draconis_store_report {
    // Not 0: no damage was found.
    int clean;
    // Not 0: everything could be checked.
    int complete;
    // Number of damaged places.
    uint64_t damage;
    // Number of objects.
    uint64_t objects;
    // Number of keys.
    uint64_t keys;
} draconis_store_report;

// A buffer to fill, or NULL.
typedef void *OutBuffer;

// Information about a volume.
typedef struct draconis_volume_info {
    // "ext2", "ext3" or "ext4".
    char kind[8];
    // The label.
    char label[20];
    // The UUID.
    uint8_t uuid[16];
    // Length in bytes.
    uint64_t size_bytes;
    // Block size.
    uint32_t block_bytes;
    // Not 0: cleanly unmounted.
    int clean;
    // Number of blocks.
    uint64_t blocks;
    // Number of free blocks.
    uint64_t free_blocks;
    // Number of inodes.
    uint64_t inodes;
    // Number of free inodes.
    uint64_t free_inodes;
} draconis_volume_info;

// A time: seconds since 1970, and nanoseconds after that.
typedef struct draconis_time {
    // Seconds; negative before 1970.
    int64_t seconds;
    // 0 to 999999999.
    uint32_t nanoseconds;
} draconis_time;

// File attributes, as of stat(2).
typedef struct draconis_stat_data {
    // Inode number.
    uint32_t inode;
    // File type and permissions, as st_mode.
    uint32_t mode;
    // Number of hard links.
    uint32_t links;
    // User ID of the owner.
    uint32_t uid;
    // Group ID.
    uint32_t gid;
    // Major number of a device.
    uint32_t device_major;
    // Minor number of a device.
    uint32_t device_minor;
    // Length in bytes.
    uint64_t size_bytes;
    // Allocated space, in units of 512 bytes.
    uint64_t blocks_512;
    // Last access.
    struct draconis_time accessed;
    // Last modification of the contents.
    struct draconis_time modified;
    // Last change of the inode.
    struct draconis_time changed;
} draconis_stat_data;

// A directory entry.
typedef struct draconis_entry {
    // The name. Valid until the next call with this directory.
    const char *name;
    // Inode number.
    uint32_t inode;
    // File type, as in st_mode.
    uint32_t kind;
} draconis_entry;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns the message of this thread's last failed call: the object, the failure, and the next
// step where there is one. Empty if no call failed. Valid until the next failure in this thread;
// must not be freed.
const char *draconis_error_message(void);

// Returns the version of the library, such as "0.1.0". Must not be freed.
const char *draconis_version(void);

// Creates an empty batch; never NULL. draconis_batch_free or draconis_keys_write frees it.
struct draconis_batch *draconis_batch_new(void);

// Frees a batch without writing it. Accepts NULL.
void draconis_batch_free(struct draconis_batch *batch);

// Adds setting the value of a key.
int draconis_batch_put(struct draconis_batch *batch,
                       const void *key,
                       size_t key_len,
                       const void *value,
                       size_t value_len);

// Adds deleting a key, if it exists.
int draconis_batch_delete(struct draconis_batch *batch, const void *key, size_t key_len);

// Applies a batch atomically, after everything submitted before, and frees batch even on failure.
// The changes are durable once draconis_store_wait has returned for the ticket. ticket may be
// NULL.
int draconis_keys_write(const struct draconis_store *store,
                        struct draconis_batch *batch,
                        uint64_t *ticket);

// Sets the value of one key, as a batch of its own.
int draconis_keys_put(const struct draconis_store *store,
                      const void *key,
                      size_t key_len,
                      const void *value,
                      size_t value_len,
                      uint64_t *ticket);

// Deletes one key, as a batch of its own.
int draconis_keys_delete(const struct draconis_store *store,
                         const void *key,
                         size_t key_len,
                         uint64_t *ticket);

// Gets the value of a key: returns 1 and the value, which draconis_value_free frees, or 0 and NULL
// if the key does not exist.
int draconis_keys_get(const struct draconis_store *store,
                      const void *key,
                      size_t key_len,
                      struct draconis_value **value);

// Returns the bytes of a value, valid until it is freed. value must not be NULL.
struct draconis_bytes draconis_value_bytes(const struct draconis_value *value);

// Frees a value. Accepts NULL.
void draconis_value_free(struct draconis_value *value);

// Begins a scan of the keys from from (inclusive) to to (exclusive), in byte order; NULL with
// length 0 means no bound. flags: 0 or DRACONIS_REVERSE. draconis_scan_close frees the
// scan.
int draconis_scan_open(const struct draconis_store *store,
                       const void *from,
                       size_t from_len,
                       const void *to,
                       size_t to_len,
                       uint32_t flags,
                       struct draconis_scan **scan);

// Gets the next key and its value, which may be NULL: returns 1, or 0 at the end. The bytes are
// valid until the next call with this scan. After an error the scan continues past the damage.
int draconis_scan_next(struct draconis_scan *scan,
                       struct draconis_bytes *key,
                       struct draconis_bytes *value);

// Closes a scan. Accepts NULL.
void draconis_scan_close(struct draconis_scan *scan);

// Creates an empty volume in image: a file, which is created if missing, a block device, or
// "STORE#NAME", a disk in a store. options may be NULL.
int draconis_format(CStrArg image, const struct draconis_format_options *options);

// Creates a volume as draconis_format does, and fills it. options may be NULL; without a size, a
// file becomes as long as its contents need. note may be NULL; it is called in this thread with a
// sentence for each kind of item that is skipped.
int draconis_format_filled(CStrArg image,
                           const struct draconis_format_options *options,
                           const struct draconis_fill_options *fill,
                           draconis_complaint_fn note,
                           void *context);

// Grows the volume in image to size_bytes, or with 0 to the whole file or device. A file is
// extended with a hole. grown and place may be NULL; grown gets the new length. After an
// interruption the volume is unchanged, or growing it again completes the change.
int draconis_grow(CStrArg image,
                  const struct draconis_place *place,
                  uint64_t size_bytes,
                  uint64_t *grown);

// Shrinks the volume in image to size_bytes, or with 0 to its minimum. Data beyond the new end is
// moved, inodes there get new numbers, and a file is truncated after the volume. The rest is as
// for draconis_grow.
int draconis_shrink(CStrArg image,
                    const struct draconis_place *place,
                    uint64_t size_bytes,
                    uint64_t *shrunk);

// Changes superblock settings of the volume in image. place may be NULL. Without changes, an
// interrupted change is completed.
int draconis_tune(CStrArg image,
                  const struct draconis_place *place,
                  const struct draconis_tune_options *options);

// Checks the volume in image without changing it. complaint may be NULL; it is called in this
// thread for each problem. Damage is reported in report, not as an error. place may be NULL.
int draconis_check(CStrArg image,
                   const struct draconis_place *place,
                   draconis_complaint_fn complaint,
                   void *context,
                   struct draconis_check_report *report);

// Writes the tree at path as a tar archive (pax, holes preserved) through write, in this thread.
// Returns the number of items skipped because of errors, the first of which is in
// draconis_error_message, or a negative errno.
int64_t draconis_tar(const struct draconis_volume *volume,
                     CStrArg path,
                     draconis_write_fn write,
                     void *context);

// Creates an empty store, and the file if it is missing.
int draconis_store_create(CStrArg store, const struct draconis_store_options *options);

// Opens a store. flags: 0 or DRACONIS_WRITE. draconis_store_close frees it.
int draconis_store_open(CStrArg path, uint32_t flags, struct draconis_store **store);

// Makes all changes durable, writes a checkpoint, releases the file and frees store even on
// failure. Accepts NULL.
int draconis_store_close(struct draconis_store *store);

// Checks every checksum, map and count, without changing anything. Damage is reported in report,
// not as an error.
int draconis_store_check(CStrArg store, struct draconis_store_report *report);

// Creates an empty group; never NULL. draconis_group_free or draconis_store_submit frees it.
struct draconis_group *draconis_group_new(void);

// Frees a group without submitting it. Accepts NULL.
void draconis_group_free(struct draconis_group *group);

// Adds creating an empty object, and stores its number in id.
int draconis_group_create(struct draconis_group *group,
                          const struct draconis_store *store,
                          uint64_t *id);

// Adds writing bytes at offset at of an object.
int draconis_group_write(struct draconis_group *group,
                         uint64_t id,
                         uint64_t at,
                         const void *bytes,
                         size_t len);

// Adds appending bytes to an object.
int draconis_group_append(struct draconis_group *group,
                          uint64_t id,
                          const void *bytes,
                          size_t len);

// Adds setting the length of an object; new bytes read as zeros.
int draconis_group_truncate(struct draconis_group *group, uint64_t id, uint64_t size_bytes);

// Adds deleting an object.
int draconis_group_delete(struct draconis_group *group, uint64_t id);

// Adds giving an object a name of 1 to 255 bytes, which may have named another object.
int draconis_group_name(struct draconis_group *group, const void *name, size_t len, uint64_t id);

// Adds removing a name; the object remains.
int draconis_group_unname(struct draconis_group *group, const void *name, size_t len);

// Applies a group atomically, after everything submitted before, and frees group even on failure.
// The changes are durable once draconis_store_wait has returned for the ticket. ticket may be
// NULL.
int draconis_store_submit(const struct draconis_store *store,
                          struct draconis_group *group,
                          uint64_t *ticket);

// Waits until the group with this ticket and everything before it is durable.
int draconis_store_wait(const struct draconis_store *store, uint64_t ticket);

// Makes all submitted changes durable.
int draconis_store_sync(const struct draconis_store *store);

// Reads up to len bytes of an object from offset at. Returns the number of bytes read, or a
// negative errno: ENOENT if the object does not exist.
int64_t draconis_object_read(const struct draconis_store *store,
                             uint64_t id,
                             uint64_t at,
                             OutBuffer buffer,
                             size_t len);

// Returns the length of an object, or a negative errno.
int64_t draconis_object_size(const struct draconis_store *store, uint64_t id);

// Gets the number of the object with a name; ENOENT if there is none.
int draconis_object_named(const struct draconis_store *store,
                          const void *name,
                          size_t len,
                          uint64_t *id);

// Lists the objects. draconis_object_list_close frees the list.
int draconis_object_list_open(const struct draconis_store *store,
                              struct draconis_object_list **objects);

// Gets the next object, by number: returns 1, or 0 at the end. id and size_bytes may be NULL.
int draconis_object_list_next(struct draconis_object_list *objects,
                              uint64_t *id,
                              uint64_t *size_bytes);

// Frees a list. Accepts NULL.
void draconis_object_list_close(struct draconis_object_list *objects);

// Opens the volume in image: a file, a block device, a partition of either, a disk image (qcow2,
// VHDX; read-only: VHD, VMDK, Android sparse, gzip, zstd, xz), or "STORE#NAME". flags: 0 or
// DRACONIS_WRITE. place may be NULL. draconis_volume_close frees the volume.
int draconis_volume_open(CStrArg image,
                         const struct draconis_place *place,
                         uint32_t flags,
                         struct draconis_volume **volume);

// Opens an image with backing_count backing files, nearest first. They replace the backing file
// in place, and are opened read-only.
int draconis_volume_open_over(CStrArg image,
                              const struct draconis_place *place,
                              CStrArrayArg backing,
                              size_t backing_count,
                              uint32_t flags,
                              struct draconis_volume **volume);

// Makes all changes durable, marks the volume as unmounted, releases the image and frees volume
// even on failure. Open files then return EBADF; they must still be closed. Accepts
// NULL.
int draconis_volume_close(struct draconis_volume *volume);

// Makes all changes durable. Without this or draconis_file_sync, changes stay in memory until they
// exceed a limit.
int draconis_volume_sync(const struct draconis_volume *volume);

// Gets information about a volume.
int draconis_volume_get_info(const struct draconis_volume *volume,
                             struct draconis_volume_info *info);

// Gets the attributes of a file. flags: 0 or DRACONIS_NOFOLLOW.
int draconis_stat(const struct draconis_volume *volume,
                  CStrArg path,
                  uint32_t flags,
                  struct draconis_stat_data *data);

// Opens a directory for listing. draconis_dir_close frees it.
int draconis_dir_open(const struct draconis_volume *volume,
                      CStrArg path,
                      struct draconis_dir **dir);

// Gets the next name in byte order, without "." and "..": returns 1, or 0 at the end. In a damaged
// directory, the readable names come first and then -EUCLEAN.
int draconis_dir_next(struct draconis_dir *dir, struct draconis_entry *entry);

// Closes a directory. Accepts NULL.
void draconis_dir_close(struct draconis_dir *dir);

// Copies up to len bytes of a symbolic link's target to buffer, without a final NUL. Returns the
// full length, or a negative errno.
int64_t draconis_readlink(const struct draconis_volume *volume,
                          CStrArg path,
                          OutBuffer buffer,
                          size_t len);

// Copies up to len bytes of an extended attribute, given by full name such as "user.x", to buffer.
// Returns the full length, or a negative errno: ENODATA if it does not exist. flags: 0 or
// DRACONIS_NOFOLLOW.
int64_t draconis_getxattr(const struct draconis_volume *volume,
                          CStrArg path,
                          CStrArg name,
                          uint32_t flags,
                          OutBuffer buffer,
                          size_t len);

// Copies up to len bytes of the names of extended attributes, each followed by a NUL, to buffer.
// Returns the full length, or a negative errno. flags: 0 or DRACONIS_NOFOLLOW.
int64_t draconis_listxattr(const struct draconis_volume *volume,
                           CStrArg path,
                           uint32_t flags,
                           OutBuffer buffer,
                           size_t len);

// Sets an extended attribute, given by full name, to len bytes. flags: any of DRACONIS_NOFOLLOW
// and DRACONIS_EXCLUSIVE: EEXIST if it exists.
int draconis_setxattr(const struct draconis_volume *volume,
                      CStrArg path,
                      CStrArg name,
                      const void *value,
                      size_t len,
                      uint32_t flags);

// Removes an extended attribute: ENODATA if it does not exist. flags: 0 or
// DRACONIS_NOFOLLOW.
int draconis_removexattr(const struct draconis_volume *volume,
                         CStrArg path,
                         CStrArg name,
                         uint32_t flags);

// Creates a directory with these permissions, owned by the calling user.
int draconis_mkdir(const struct draconis_volume *volume, CStrArg path, uint32_t mode);

// Creates a symbolic link at path with this target.
int draconis_symlink(const struct draconis_volume *volume, CStrArg target, CStrArg path);

// Creates a hard link.
int draconis_link(const struct draconis_volume *volume, CStrArg from, CStrArg to);

// Removes a file that is no directory.
int draconis_unlink(const struct draconis_volume *volume, CStrArg path);

// Removes an empty directory.
int draconis_rmdir(const struct draconis_volume *volume, CStrArg path);

// Renames a file or directory; an existing file at to is replaced, unless flags is
// DRACONIS_NOREPLACE or DRACONIS_EXCHANGE.
int draconis_rename(const struct draconis_volume *volume, CStrArg from, CStrArg to, uint32_t flags);

// Changes permissions. flags, here and below: 0 or DRACONIS_NOFOLLOW.
int draconis_chmod(const struct draconis_volume *volume,
                   CStrArg path,
                   uint32_t mode,
                   uint32_t flags);

// Changes owner and group.
int draconis_chown(const struct draconis_volume *volume,
                   CStrArg path,
                   uint32_t uid,
                   uint32_t gid,
                   uint32_t flags);

// Sets the access and modification times.
int draconis_utimes(const struct draconis_volume *volume,
                    CStrArg path,
                    struct draconis_time accessed,
                    struct draconis_time modified,
                    uint32_t flags);

// Opens a regular file. flags: any of DRACONIS_WRITE, DRACONIS_CREATE, DRACONIS_EXCLUSIVE,
// DRACONIS_TRUNCATE. A new file gets these permissions. draconis_file_close frees the
// file.
int draconis_file_open(const struct draconis_volume *volume,
                       CStrArg path,
                       uint32_t flags,
                       uint32_t mode,
                       struct draconis_file **file);

// Reads up to len bytes from offset. Returns the number of bytes read, which is short only at the
// end of the file, or a negative errno.
int64_t draconis_file_read(const struct draconis_file *file,
                           uint64_t offset,
                           OutBuffer buffer,
                           size_t len);

// Writes len bytes at offset. Returns the number of bytes written, which is short if the volume
// became full, or a negative errno.
int64_t draconis_file_write(const struct draconis_file *file,
                            uint64_t offset,
                            const void *bytes,
                            size_t len);

// Sets the length of a file; new bytes read as zeros.
int draconis_file_truncate(const struct draconis_file *file, uint64_t size_bytes);

// Gets the attributes of an open file.
int draconis_file_stat(const struct draconis_file *file, struct draconis_stat_data *data);

// Makes a file and its directory entry durable.
int draconis_file_sync(const struct draconis_file *file);

// Closes a file. Its data is durable after draconis_volume_close or a sync. Accepts
// NULL.
void draconis_file_close(struct draconis_file *file);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DRACONIS_H */
