from contaccum.cli import main

main()
