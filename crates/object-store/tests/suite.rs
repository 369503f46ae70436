//! The conformance suite of the crate `object_store`, whole.

use crate::common::TestStore;
use object_store::integration::*;

/// Runs functions of the suite on a new store, which is checked afterwards.
macro_rules! suite {
    ($($name:ident($store:ident) $call:expr;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            let test = TestStore::create(160 << 20);
            {
                let $store = &test.open();
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
    lists_in_pages(store) list_paginated(store, store);
    lists_after_an_offset(store) list_with_offset_exclusivity(store);
    missing_objects(store) async {
        get_nonexistent_object(store, None).await.unwrap_err();
    };
    renames_and_copies(store) rename_and_copy(store);
    copies_if_missing(store) copy_if_not_exists(store);
    copies_and_renames_of_missing_objects(store) copy_rename_nonexistent_object(store);
    uploads_in_parts(store) multipart(store, store);
    uploads_in_parts_with_attributes(store) multipart_with_opts(store, store);
    parts_in_any_order(store) multipart_put_part_out_of_order(store, store);
    parts_awaited_in_any_order(store) multipart_out_of_order(store);
    concurrent_uploads_to_one_path(store) multipart_race_condition(store, true);
}
