"""The API description: `/openapi.json` and the pages at `/docs`."""
