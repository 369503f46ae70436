//! zarrs, unmodified, with arrays in a store.

#[path = "../../../crates/object-store/tests/common/mod.rs"]
mod common;

use std::sync::Arc;

use common::TestStore;
use zarrs::array::{Array, ArrayBuilder, data_type};
use zarrs::group::GroupBuilder;
use zarrs::storage::AsyncReadableWritableListableStorage;
use zarrs_object_store::AsyncObjectStore;

const ROWS: u64 = 200;
const COLUMNS: u64 = 300;

type Failure = Box<dyn std::error::Error>;

#[tokio::test(flavor = "multi_thread")]
async fn arrays_are_the_same_after_reopening() -> Result<(), Failure> {
    let test = TestStore::create(64 << 20);
    let mut expected: Vec<f64> = (0..ROWS * COLUMNS).map(|nth| nth as f64).collect();
    {
        let store = test.open();
        let zarr: AsyncReadableWritableListableStorage =
            Arc::new(AsyncObjectStore::new(store.clone()));
        GroupBuilder::new().build(zarr.clone(), "/")?.async_store_metadata().await?;
        let shape = vec![ROWS, COLUMNS];
        let plain = ArrayBuilder::new(shape.clone(), vec![50, 70], data_type::float64(), f64::NAN)
            .build(zarr.clone(), "/plain")?;
        let mut sharded = ArrayBuilder::new(shape, vec![100, 100], data_type::float64(), 0.0);
        sharded.subchunk_shape(vec![10, 10]);
        let sharded = sharded.build(zarr.clone(), "/sharded")?;
        for array in [&plain, &sharded] {
            array.async_store_metadata().await?;
            array.async_store_array_subset(&[0..ROWS, 0..COLUMNS], &expected).await?;
            // Parts of chunks: read, changed, written.
            array.async_store_array_subset(&[10..60, 100..200], &vec![-1.0; 50 * 100]).await?;
        }
        drop((plain, sharded, zarr));
        store.close().await?;
    }
    for row in 10..60 {
        let from = (row * COLUMNS + 100) as usize;
        expected[from..from + 100].fill(-1.0);
    }
    {
        let store = test.open();
        let zarr: AsyncReadableWritableListableStorage =
            Arc::new(AsyncObjectStore::new(store.clone()));
        for name in ["/plain", "/sharded"] {
            let array = Array::async_open(zarr.clone(), name).await?;
            let all: Vec<f64> = array.async_retrieve_array_subset(&[0..ROWS, 0..COLUMNS]).await?;
            assert!(all == expected, "{name}");
            let some: Vec<f64> = array.async_retrieve_array_subset(&[123..125, 7..9]).await?;
            let at = |row, column| expected[(row * COLUMNS + column) as usize];
            assert_eq!(some, [at(123, 7), at(123, 8), at(124, 7), at(124, 8)]);
        }
        drop(zarr);
        store.close().await?;
    }
    test.check();
    Ok(())
}
