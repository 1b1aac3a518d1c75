"""The tables of stored responses, the same in SQLite and PostgreSQL. A change of them needs new names."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

METADATA = MetaData()

RESPONSES = Table(
    "raylm_responses_v1",
    METADATA,
    Column("id", String(128), primary_key=True),
    Column("tenant", String(256), nullable=False),
    Column("model", Text, nullable=False),
    Column("status", String(16), nullable=False),
    Column("background", Boolean, nullable=False),
    Column("streamed", Boolean, nullable=False),
    Column("previous_id", String(128)),
    # Seconds since the epoch.
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53), nullable=False),
    # The ingress that runs it, and until when others believe that it does.
    Column("owner", String(64), nullable=False),
    Column("lease_until", Float(53), nullable=False),
    Column("attempts", Integer, nullable=False),
    # Events published so far: the next one's sequence number.
    Column("num_events", Integer, nullable=False),
    # What the tenant is charged for: all blobs of this response, its events too.
    Column("num_bytes", BigInteger, nullable=False),
    Column("request", LargeBinary, nullable=False),
    Column("input", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
Index("raylm_responses_v1_expiry", RESPONSES.c.expires_at)
Index("raylm_responses_v1_owner", RESPONSES.c.owner, RESPONSES.c.status)
Index("raylm_responses_v1_lease", RESPONSES.c.status, RESPONSES.c.lease_until)

EVENTS = Table(
    "raylm_response_events_v1",
    METADATA,
    Column("response_id", String(128), primary_key=True),
    # A row holds the events of these sequence numbers, as they are sent.
    Column("first", Integer, primary_key=True, autoincrement=False),
    Column("last", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

TENANTS = Table(
    "raylm_response_tenants_v1",
    METADATA,
    Column("tenant", String(256), primary_key=True),
    Column("num_bytes", BigInteger, nullable=False),
)
