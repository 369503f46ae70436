//! DataFusion, unmodified, with Parquet files in a store: queries give the rows that they give over
//! tables in memory.

#[path = "../../../crates/object-store/tests/common/mod.rs"]
mod common;

use std::sync::Arc;

use common::TestStore;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::datasource::object_store::ObjectStoreUrl;
use datafusion::error::Result;
use datafusion::prelude::{ParquetReadOptions, SessionContext};
use draconis_object_store::{DraconisStore, v0_13};

const SALES: &str = "SELECT value AS id, value * 7919 % 2003 AS customer, \
                     'region ' || (value * 31 % 7) AS region, value * 104729 % 1000 AS amount \
                     FROM generate_series(1, 100000)";
const CUSTOMERS: &str = "SELECT value AS customer, 'name ' || (value * 15485863 % 9973) AS name \
                         FROM generate_series(0, 2002)";
const QUERIES: [&str; 6] = [
    "SELECT count(*), sum(amount), min(id), max(id) FROM sales",
    "SELECT region, count(*), sum(amount), avg(amount) FROM sales GROUP BY region ORDER BY region",
    "SELECT id, amount FROM sales WHERE region = 'region 3' AND amount > 990 ORDER BY id LIMIT 50",
    "SELECT name, sum(amount) FROM sales JOIN customers USING (customer) \
     GROUP BY name ORDER BY 2 DESC, 1 LIMIT 20",
    "SELECT id, rank() OVER (PARTITION BY region ORDER BY amount DESC, id) AS place FROM sales \
     WHERE id < 500 ORDER BY id",
    "SELECT count(*) FROM sales a WHERE NOT EXISTS \
     (SELECT 1 FROM customers b WHERE b.customer = a.customer)",
];

fn session(store: &DraconisStore) -> SessionContext {
    let session = SessionContext::new();
    let url = ObjectStoreUrl::parse("draconis://store").unwrap();
    let objects = Arc::new(v0_13::DraconisStore::from(store.clone()));
    session.register_object_store(url.as_ref(), objects);
    session
}

async fn query(session: &SessionContext, sql: &str) -> Result<String> {
    let batches = session.sql(sql).await?.collect().await?;
    Ok(pretty_format_batches(&batches)?.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_over_parquet_files_give_the_rows_of_tables_in_memory() -> Result<()> {
    let test = TestStore::create(128 << 20);
    let memory = SessionContext::new();
    for (name, rows) in [("sales", SALES), ("customers", CUSTOMERS)] {
        query(&memory, &format!("CREATE TABLE {name} AS {rows}")).await?;
    }
    {
        let store = test.open();
        let session = session(&store);
        let copy = format!(
            "COPY ({SALES}) TO 'draconis://store/sales/' STORED AS PARQUET PARTITIONED BY (region)"
        );
        assert!(query(&session, &copy).await?.contains("100000"));
        let copy =
            format!("COPY ({CUSTOMERS}) TO 'draconis://store/customers.parquet' STORED AS PARQUET");
        query(&session, &copy).await?;
        store.close().await.unwrap();
    }
    let store = test.open();
    let session = session(&store);
    for (name, path) in [("sales", "sales/"), ("customers", "customers.parquet")] {
        let mut options = ParquetReadOptions::default();
        if name == "sales" {
            let text = datafusion::arrow::datatypes::DataType::Utf8;
            options = options.table_partition_cols(vec![("region".into(), text)]);
        }
        session.register_parquet(name, format!("draconis://store/{path}"), options).await?;
    }
    for sql in QUERIES {
        assert_eq!(query(&session, sql).await?, query(&memory, sql).await?, "{sql}");
    }
    // Rows that are added are a file more.
    let insert = "INSERT INTO sales SELECT 100001, 5, 1, 'region 3'";
    query(&session, insert).await?;
    let count = query(&session, "SELECT count(*) AS n, max(id) AS last FROM sales").await?;
    assert!(count.contains("| 100001 | 100001 |"), "{count}");
    drop((session, store));
    test.check();
    Ok(())
}
