"""HTTP for S3 in which no request waits for ever.

aiohttp has a time-out for what it reads, but none while it waits to send a body: for a storage that
accepts a connection and then says nothing it would wait until the connection breaks.
"""

import asyncio
from typing import Any

from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import ReadTimeoutError


def bounded_session(longest_s: float) -> type[AIOHTTPSession]:
    """The kind of session in which a request has so many seconds until its answer begins."""

    class BoundedSession(AIOHTTPSession):
        async def send(self, request: Any) -> Any:
            try:
                return await asyncio.wait_for(super().send(request), longest_s)
            except TimeoutError:
                raise ReadTimeoutError(endpoint_url=request.url) from None

    return BoundedSession
