//! The conformance suite of `object_store` 0.13 on the interface for that version:
//!
//! ```sh
//! cargo test -p draconis-object-store --features suite-0-13 --test v0_13
//! ```

mod common;

use common::TestStore;
use draconis_object_store::v0_13::DraconisStore;
use object_store_0_13::integration::*;

/// Runs functions of the suite on a new store, which is checked afterwards.
macro_rules! suite {
    ($($name:ident($store:ident) $call:expr;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            let test = TestStore::create(160 << 20);
            {
                let $store = &DraconisStore::from(test.open());
                $call.await;
            }
            test.check();
        }
    )*};
}

suite! {
    puts_gets_deletes_and_lists(store) put_get_delete_list(store);
    attributes_are_stored(store) put_get_attributes(store);
    conditional_gets(store) get_opts(store);
    conditional_puts(store) put_opts(store, true);
    streams_are_read(store) stream_get(store);
    lists_of_directories(store) list_uses_directories_correctly(store);
    lists_with_delimiter(store) list_with_delimiter(store);
    lists_after_an_offset(store) list_with_offset_exclusivity(store);
    missing_objects(store) async {
        get_nonexistent_object(store, None).await.unwrap_err();
    };
    renames_and_copies(store) rename_and_copy(store);
    copies_if_missing(store) copy_if_not_exists(store);
    copies_and_renames_of_missing_objects(store) copy_rename_nonexistent_object(store);
    parts_awaited_in_any_order(store) multipart_out_of_order(store);
    concurrent_uploads_to_one_path(store) multipart_race_condition(store, true);
}
